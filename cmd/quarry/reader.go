package main

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"quarry/api/client"
	"quarry/store/chunk"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// newReader is hidden: mounts start it by themselves.
func newReader() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:    "reader --worker-dir DIR",
		Short:  "serve the images of a worker folder over NBD",
		Hidden: true,
		Args:   exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runReader(c.Context(), dir, c.ErrOrStderr())
		},
	}
	c.Flags().StringVar(&dir, "worker-dir", "", "worker folder")
	return c
}

func runReader(ctx context.Context, dir string, stderr io.Writer) error {
	d, err := folder.Open(dir)
	if err != nil {
		return err
	}
	return reader.Run(ctx, reader.Config{
		Dir: d, Open: openChunks, Log: slog.New(slog.NewJSONHandler(stderr, nil)),
	})
}

// chunkSource is a store client as the reader wants it.
type chunkSource struct {
	*client.Client
	data dataDir // the store's data folder, "" for a store node
}

var _ reader.ChunkSource = chunkSource{}

func openChunks(o folder.Origin) (reader.ChunkSource, error) {
	t := target{data: o.Data, store: strings.Join(o.Stores, ",")}
	c, err := t.dial()
	if err != nil {
		return nil, err
	}
	return chunkSource{Client: c, data: dataDir(o.Data)}, nil
}

// Traffic implements reader.ChunkSource.
func (s chunkSource) Traffic() (requests, wireBytes int64) { return traffic(s.Client) }

func traffic(c *client.Client) (requests, wireBytes int64) {
	st := c.Stats()
	return int64(st.Requests), int64(st.BytesIn + st.BytesOut)
}

// KeepAlive implements reader.ChunkSource. Only a data folder's own socket
// takes leases.
func (s chunkSource) KeepAlive(ctx context.Context, lease string, id chunk.Digest, ttl time.Duration) error {
	if s.data == "" {
		return nil
	}
	_, err := s.RenewLease(ctx, lease, id.String(), ttl)
	return err
}

// EndLease implements reader.ChunkSource.
func (s chunkSource) EndLease(ctx context.Context, lease string) error {
	// A server that is gone has no lease, and none is started to hear that.
	if s.data == "" || !answers(ctx, s.data) {
		return nil
	}
	return s.Client.EndLease(ctx, lease)
}
