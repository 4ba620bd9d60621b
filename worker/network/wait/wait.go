// Package wait knows when a sandbox waits for its model and when the answer comes.
// It reads copies of the headers that pass between guests and the model's endpoints,
// which nftables hands over one by one, so that a sandbox can be paused while nothing
// but the model can go on, and is resumed by the first packet of the answer.
//
// Whatever it does not know for certain is no reason to pause, and is a reason to
// resume: a sandbox that runs costs memory, one that is not woken costs its work
// (docs/decisions/model-wait.md).
package wait

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// Reason says why a sandbox is resumed.
type Reason string

// The reasons. They are values of a label of a metric.
const (
	Answer   Reason = "answer"   // data of the model's answer that was not seen before
	Closed   Reason = "closed"   // the model ended the connection
	Reset    Reason = "reset"    // a reset, by either side
	ICMP     Reason = "icmp"     // an error about one of its connections
	Asks     Reason = "asks"     // the guest goes on sending, so there was more to send
	Unclear  Reason = "unclear"  // a packet for the guest that cannot be read
	Overrun  Reason = "overrun"  // the kernel could not hand over packets, or some are missing
	Rules    Reason = "rules"    // somebody changed or removed the rules
	Reader   Reason = "reader"   // packets cannot be read any more
	Longest  Reason = "longest"  // it was paused as long as one may be
	Used     Reason = "used"     // it is needed: an exec, a file, a call of the API
	Endpoint Reason = "endpoint" // the endpoints are others now
	Stopped  Reason = "stopped"  // nobody watches any more
)

// Reasons are all of them, for who counts by reason.
var Reasons = []Reason{Answer, Closed, Reset, ICMP, Asks, Unclear, Overrun, Rules, Reader, Longest, Used, Endpoint, Stopped}

// Wake is why and since when a sandbox is to run.
type Wake struct {
	Why  Reason
	Seen time.Time // when that was seen; how late the sandbox is counts from here
}

// Config is what a Watcher is made of. The zero value of a field is its default.
type Config struct {
	// Name is that of the nftables table, which the Watcher owns and which is gone
	// when it is closed or its process ends. Two watchers of one machine need two.
	Name string
	// Endpoints are where models are reached, by IPv4 and plain TCP, as the guest
	// writes them.
	Endpoints []netip.AddrPort
	// Netns is the path of the network namespace that the host's ends of the
	// sandboxes are in. The default is the process's.
	Netns string
	// Quiet is how long a request goes without an answer, and the sandbox almost
	// without a processor, before it is paused; default 50 ms.
	Quiet time.Duration
	// Longest is how long a sandbox is paused at most; default 10 minutes.
	Longest time.Duration
	// Share of one processor that a waiting sandbox may use; default 0.1: polls of
	// the runtime and of the agent's other threads.
	Share float64
	// Buffer of the socket in bytes; default 8 MiB, some 10 000 packets, as each takes
	// 768 bytes of it.
	Buffer  int
	Metrics *Metrics // default: counted for nobody
	Log     *slog.Logger
}

// Sandbox is what is watched. Its functions are called from one goroutine, one at a
// time, and not before Watch has returned.
type Sandbox struct {
	ID   string
	Veth string     // the host's interface
	Addr netip.Addr // the guest's

	// CPU returns the processor time that the sandbox has used. After an error it is
	// not paused.
	CPU func() (time.Duration, error)
	// Pause is called when the sandbox waits for its model alone, and refuses where it
	// must not be paused: after an error it runs. ctx ends when an answer comes while it is being paused: Resume follows in
	// any case where the error is nil.
	Pause func(ctx context.Context) error
	// Resume is called once after every Pause without an error, and again until it
	// returns nil.
	Resume func(ctx context.Context, w Wake) error
}

// What callers branch on.
var (
	ErrClosed   = errors.New("the watcher is closed")
	ErrWatched  = errors.New("the sandbox is watched already")
	ErrEndpoint = errors.New("not an endpoint that can be watched: it needs an IPv4 address and a port")
	ErrTable    = errors.New("the table of rules is another's: two workers need two names")
)

// MaxEndpoints bounds the endpoints of one Watcher.
const MaxEndpoints = 64

// Resolve returns the addresses of endpoints that are given as host:port, in an order
// that is the same for the same addresses. Guests must find the same ones by these
// names: an endpoint behind a name whose answers change is better named by address.
func Resolve(ctx context.Context, r *net.Resolver, hosts []string) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	for _, h := range hosts {
		host, portText, err := net.SplitHostPort(h)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrEndpoint, h, err)
		}
		port, err := strconv.ParseUint(portText, 10, 16)
		if err != nil || port == 0 {
			return nil, fmt.Errorf("%w: %s", ErrEndpoint, h)
		}
		addrs, err := r.LookupNetIP(ctx, "ip4", host)
		if err != nil {
			return nil, fmt.Errorf("find the model endpoint %s: %w", h, err)
		}
		for _, a := range addrs {
			out = append(out, netip.AddrPortFrom(a.Unmap(), uint16(port)))
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	out = slices.Compact(out)
	return out, checkEndpoints(out)
}

func (c Config) withDefaults() Config {
	if c.Quiet <= 0 {
		c.Quiet = 50 * time.Millisecond
	}
	if c.Longest <= 0 {
		c.Longest = 10 * time.Minute
	}
	if c.Share <= 0 {
		c.Share = 0.1
	}
	if c.Buffer <= 0 {
		c.Buffer = 8 << 20
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}
