package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/api/client"
	"quarry/store/chunk"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// newReader is hidden: mounts start it by themselves.
func newReader() *cobra.Command {
	var dir string
	var f readerFlags
	c := &cobra.Command{
		Use:    "reader --worker-dir DIR",
		Short:  "serve the images of a worker folder over NBD",
		Hidden: true,
		Args:   exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runReader(c.Context(), dir, f, c.ErrOrStderr())
		},
	}
	c.Flags().StringVar(&dir, "worker-dir", "", "worker folder")
	f.flags(c)
	return c
}

// spareProcs is how many more processors the Go runtime is told of than it would
// use. Two are for threads of connections that wait for a request: each keeps one,
// and when none is left the runtime takes it away after 20 µs, which costs several
// wake-ups. Two are for goroutines: while two decode and a third writes, Go would look
// at the sockets only when one of them is done, milliseconds later; the kernel lets
// the thread that reads them go first.
const spareProcs = 4

func runReader(ctx context.Context, dir string, f readerFlags, stderr io.Writer) error {
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + spareProcs)
	lateHeap()
	limit, err := f.cacheSize.bytes()
	if err != nil {
		return err
	}
	timeout, err := f.readTimeout.duration()
	if err != nil {
		return err
	}
	d, err := folder.Open(dir)
	if err != nil {
		return err
	}
	return reader.Run(ctx, reader.Config{
		Dir: d, Open: openChunks, DiskBytes: limit, ReadTimeout: timeout, Sleep: f.sleep, Log: slog.New(slog.NewJSONHandler(stderr, nil)),
	})
}

// chunkSource is the store clients of an image as the reader wants them.
type chunkSource struct {
	*client.Stores
	clients []*client.Client // of all stores
	data    dataDir          // "" for store nodes
	renewed *time.Time       // when all of them were told of the lease; its caller locks
}

var _ reader.ChunkSource = chunkSource{}

func openChunks(o folder.Origin) (reader.ChunkSource, error) {
	t := target{data: o.Data, store: strings.Join(o.Stores, ","), tokenFile: o.TokenFile, ca: o.CA, patient: true}
	clients, err := t.dialAll()
	if err != nil {
		return nil, err
	}
	return chunkSource{
		Stores:  client.NewStores(client.StoresConfig{Clients: clients}),
		clients: clients, data: dataDir(o.Data), renewed: new(time.Time),
	}, nil
}

// Bootstrap implements folder.Content.
func (s chunkSource) Bootstrap(ctx context.Context, d chunk.Digest, size int64) ([]byte, error) {
	p, err := s.Stores.Bootstrap(ctx, d, size)
	return p, lasting(err)
}

// Config implements folder.Content.
func (s chunkSource) Config(ctx context.Context, d chunk.Digest) ([]byte, error) {
	p, err := s.Stores.Config(ctx, d)
	return p, lasting(err)
}

// lasting tells what a server will say again.
func lasting(err error) error {
	var e *api.Error
	if errors.As(err, &e) && !e.Retryable || errors.Is(err, api.ErrObjectCorrupt) {
		return fmt.Errorf("%w: %w", folder.ErrNoContent, err)
	}
	return err
}

// Traffic implements reader.ChunkSource.
func (s chunkSource) Traffic() reader.Traffic {
	st := s.Stats()
	t := trafficOf(st.Stats)
	t.Hedges, t.HedgesWon, t.AskedAgain = int64(st.Hedges), int64(st.HedgesWon), int64(st.Again)
	return t
}

// trafficOf is what a client's figures say of the network.
func trafficOf(st client.Stats) reader.Traffic {
	return reader.Traffic{
		Requests: int64(st.Requests), WireBytes: int64(st.BytesIn + st.BytesOut), BucketBytes: int64(st.BucketBytes),
	}
}

// remoteTTL is how long a lease at a store node lasts, and remoteEvery how often it is
// renewed: hundreds of workers do that for each of their mounts.
const (
	remoteTTL   = 10 * time.Minute
	remoteEvery = 2 * time.Minute
)

// KeepAlive implements reader.ChunkSource. Every store of the image is told: they may
// be stores of their own.
func (s chunkSource) KeepAlive(ctx context.Context, lease string, id, bootstrap chunk.Digest, ttl time.Duration) error {
	if s.data == "" {
		if time.Since(*s.renewed) < remoteEvery {
			return nil
		}
		ttl = remoteTTL
	}
	err := s.each(func(c *client.Client) error {
		_, err := c.RenewLease(ctx, lease, id.String(), bootstrap, ttl)
		return err
	})
	if err == nil {
		*s.renewed = time.Now()
	}
	return err
}

// each calls fn for all stores at once, so that one which is away holds up no other.
func (s chunkSource) each(fn func(*client.Client) error) error {
	var g errgroup.Group
	errs := make([]error, len(s.clients))
	for i, c := range s.clients {
		g.Go(func() error { errs[i] = fn(c); return nil })
	}
	g.Wait()
	return errors.Join(errs...)
}

// SendTrace implements reader.ChunkSource.
func (s chunkSource) SendTrace(ctx context.Context, id chunk.Digest, record []byte) error {
	// A record is no reason to start a server.
	if s.data != "" && !answers(ctx, s.data) {
		return nil
	}
	return s.Stores.SendTrace(ctx, id, record)
}

// EndLease implements reader.ChunkSource.
func (s chunkSource) EndLease(ctx context.Context, lease string) error {
	// A server that is gone has no lease, and none is started to hear that.
	if s.data != "" && !answers(ctx, s.data) {
		return nil
	}
	return s.each(func(c *client.Client) error { return c.EndLease(ctx, lease) })
}
