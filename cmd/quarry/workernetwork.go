package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"

	"github.com/spf13/pflag"

	"quarry/internal/proc"
	"quarry/worker"
	"quarry/worker/network"
)

// networkFlags are the flags of worker about the network of sandboxes.
type networkFlags struct {
	off       bool
	ranges    string
	refuse    []string
	resolvers []string
	forward   bool
}

func (o *networkFlags) flags(f *pflag.FlagSet) {
	f.BoolVar(&o.off, "no-network", false, "give no sandbox a network, whatever its create asks for")
	f.StringVar(&o.ranges, "network-range", network.DefaultRange.String(), "private IPv4 range that sandboxes have their addresses from")
	f.StringArrayVar(&o.refuse, "network-refuse", nil, "CIDR that no policy may allow, beside those of metadata services and of this machine; may be repeated")
	f.StringArrayVar(&o.resolvers, "resolver", nil, "ADDRESS:PORT of a name server that is asked for allowed names; default is what /etc/resolv.conf says")
	f.BoolVar(&o.forward, "forward", true, "turn net.ipv4.ip_forward on when it is off")
}

// open makes the network, or takes over what an earlier worker left; nil with
// --no-network.
func (o *networkFlags) open(ctx context.Context, wk *worker.Worker, log *slog.Logger) (*network.Network, error) {
	if o.off {
		return nil, nil
	}
	cfg := network.Config{Folder: filepath.Join(wk.Dir.Path(), "net"), Forward: o.forward, Log: log}
	var err error
	if cfg.Range, err = netip.ParsePrefix(o.ranges); err != nil {
		return nil, fmt.Errorf("%w: --network-range: %w", errUsage, err)
	}
	for _, text := range o.refuse {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%w: --network-refuse: %w", errUsage, err)
		}
		cfg.Refuse = append(cfg.Refuse, p)
	}
	for _, text := range o.resolvers {
		p, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil, fmt.Errorf("%w: --resolver: %w", errUsage, err)
		}
		cfg.Resolvers = append(cfg.Resolvers, p)
	}
	n, err := network.New(ctx, cfg)
	if errors.Is(err, proc.ErrLocked) {
		return nil, fmt.Errorf("another quarry worker runs on %s: stop it, or give another --worker-dir", wk.Dir.Path())
	}
	if err != nil {
		return nil, fmt.Errorf("the network of sandboxes (--no-network does without): %w", err)
	}
	return n, nil
}

func (o *networkFlags) close(n *network.Network) error {
	if n == nil {
		return nil
	}
	return n.Close()
}
