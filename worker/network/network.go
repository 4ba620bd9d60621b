// Package network gives sandboxes their network: a namespace each, and to those
// whose policy has a rule a veth pair, a private address and the answerer of names
// behind it. The rules stand on the host's side of the veth, where the guest cannot
// reach them: runsc takes frames from the namespace by packet socket, so a rule
// inside it would never see them (docs/decisions/network.md).
//
// A sandbox reaches what its policy allows now, whatever it had open before: every
// packet of both directions is judged by the policy in force.
package network

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"quarry/worker/sandbox"
)

// DefaultRange is where the addresses of sandboxes come from.
var DefaultRange = netip.MustParsePrefix("10.231.0.0/16")

// Config is what a Network is made of. The zero value of a field is its default.
type Config struct {
	// Folder holds the namespaces and the state of each sandbox's network, and is
	// of this Network alone. Names of interfaces and of the nftables table come from
	// a digest of its path, so that two workers of one machine do not meet.
	Folder string
	Range  netip.Prefix   // IPv4, at most a /8 and at least a /30; a sandbox takes a /31
	Ready  int            // namespaces with a veth that are kept prepared; default 4, -1 is none
	Bare   int            // namespaces without one that are kept prepared; default 8, -1 is none
	Refuse []netip.Prefix // never reached, beside what never is: other nodes, the node's public address
	// Resolvers are asked for allowed names. The default is what /etc/resolv.conf
	// says when a name is asked for.
	Resolvers []netip.AddrPort
	Forward   bool          // turn on net.ipv4.ip_forward where it is off
	Flows     int           // connections one sandbox may have tracked at once; default 4096
	Hold      time.Duration // how long new connections to an answered address are allowed; default 10 minutes
	Log       *slog.Logger
}

// What callers branch on beside the errors of package sandbox.
var (
	ErrForward = errors.New("the node does not forward packets: set net.ipv4.ip_forward=1, or let the worker do so")
	ErrNoVeth  = errors.New("the sandbox was made without a network, and cannot be given one while it runs")
)

// Network makes and keeps the networks of one worker's sandboxes. Its methods may be
// called at once from any number of goroutines.
type Network struct {
	cfg Config
}

// New makes the table of rules, or takes over the one that a worker of the same
// folder left, whose sandboxes stay held by it. It removes nothing: see Sweep.
func New(ctx context.Context, cfg Config) (*Network, error) {
	return nil, sandbox.ErrUnsupported
}

// Close stops preparing and answering, and leaves what was taken as it is, for the
// next worker to adopt. What was prepared and not taken is removed.
func (n *Network) Close() error { return sandbox.ErrUnsupported }

// Take gives a sandbox its network. When it returns the policy is in force, as
// generation 1. A policy without a rule gets a namespace with a loopback alone, and
// can have no rule later. Errors: sandbox.ErrInvalid of the policy, ErrForward.
func (n *Network) Take(ctx context.Context, id string, p sandbox.Policy) (*Link, error) {
	return nil, sandbox.ErrUnsupported
}

// Adopt takes over the network of a sandbox that another worker took it for: its
// rules are put in force again as they were, names are answered again. Errors:
// sandbox.ErrUnknown when there is none, or not all of it.
func (n *Network) Adopt(ctx context.Context, id string) (*Link, error) {
	return nil, sandbox.ErrUnsupported
}

// Release removes the network of a sandbox, however often it is called and
// whatever is left of it. The sandbox's processes have ended before.
func (n *Network) Release(ctx context.Context, id string) error { return sandbox.ErrUnsupported }

// Sweep releases every network of this folder that is not of one of these
// sandboxes, whoever made it: namespaces, veth pairs, rules, tracked connections.
// It is called before the first Take, or with all sandboxes that have one.
func (n *Network) Sweep(ctx context.Context, live []string) error { return sandbox.ErrUnsupported }

// Check says whether a policy can be had: its error is sandbox.ErrInvalid and names
// the rule.
func Check(p sandbox.Policy) error { return nil }

// Link is the network of one sandbox.
type Link struct {
	ID        string
	NetnsPath string     // for the bundle's namespace of type network
	Veth      string     // the host's side; "" without a veth, and then there is no address either
	Addr      netip.Addr // the guest's, in a /31 with Gateway
	Gateway   netip.Addr // the host's side
	DNS       netip.Addr // who answers the guest's questions for names: Gateway
}

// ResolvConf returns what the guest's /etc/resolv.conf is to hold; it is empty
// without a veth, so that lookups fail at once.
func (l *Link) ResolvConf() []byte { return nil }

// Apply puts another policy in force and returns its generation. When it returns
// without an error no packet passes that the policy does not allow, of whatever
// connection, and connections that it allows go on. On an error the policy before
// is in force. Errors: sandbox.ErrInvalid, ErrNoVeth.
func (l *Link) Apply(ctx context.Context, p sandbox.Policy) (int64, error) {
	return 0, sandbox.ErrUnsupported
}

// State returns the policy, its generation, the one in force and the packets that
// were denied.
func (l *Link) State() sandbox.Network { return sandbox.Network{} }

// Counters returns what was counted since the sandbox was made.
func (l *Link) Counters() (Counters, error) { return Counters{}, sandbox.ErrUnsupported }

// Counters are of one sandbox.
type Counters struct {
	DeniedPackets int64
	DeniedBytes   int64
	Names         int64 // questions that were answered
	NamesRefused  int64 // questions for names that are not allowed
	NamesDropped  int64 // questions over the rate, and what is no question
}
