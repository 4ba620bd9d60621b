package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/e2e/lab"
	"quarry/rafs"
	"quarry/store/chunk"
)

const (
	// minServe is how fast batches must be served, compared with nginx that serves
	// the same bytes from one file to the same client.
	minServe = 0.6
	// answerBytes is about what one answer has; a batch of small files ends at
	// api.MaxBatch before.
	answerBytes = 4 << 20
	// batchAccept is what a worker says that it reads.
	batchAccept = api.TypeFrames2 + ", " + api.TypeFrames
	// serveRounds alternate between the servers; the ratio is the median of theirs.
	serveRounds = 3
	// maxServeMemory bounds the server with 256 connections: 512 MiB of ranges that
	// are read and not yet sent, see api's maxReads, and as much for all else.
	maxServeMemory = 1 << 30
)

// serveLoads are the numbers of connections and the requests that each makes, one
// after another. A client has an answer read before it asks for the next.
var serveLoads = []struct{ conns, requests int }{{1, 200}, {16, 30}, {256, 4}}

// exchangeable is one request to either server and what its answer's body must have.
type exchangeable struct {
	quarry, nginx []byte // the request as sent
	size          int64
}

// measureServe asks quarry serve for batches of a real image's chunks, and nginx for
// the same answers kept in a file.
func measureServe(ctx context.Context, b *bench) (err error) {
	im := b.images[0]
	data := b.lab.Path("serving")
	if _, err := b.lab.Convert(ctx, data, "oci:"+im.dir, imageName(im)); err != nil {
		return err
	}
	srv, err := b.lab.Serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, srv.Stop()) }()
	if err := os.Mkdir(b.lab.Path("answers"), 0o755); err != nil {
		return err
	}
	bodies, err := batchBodies(data)
	if err != nil {
		return err
	}
	asks, err := recordAnswers(ctx, srv, bodies, b.lab.Path("answers", "answers"))
	if err != nil {
		return err
	}
	peer, err := b.lab.Nginx(ctx, b.lab.Path("answers"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.Stop()) }()
	for _, load := range serveLoads {
		before, err := b.lab.ProcessorTime(data)
		if err != nil {
			return err
		}
		if err := b.serveAt(ctx, srv.Addr(), peer.Addr, asks, load.conns, load.requests); err != nil {
			return fmt.Errorf("%d connections: %w", load.conns, err)
		}
		after, err := b.lab.ProcessorTime(data)
		if err != nil {
			return err
		}
		answers := time.Duration(serveRounds * load.conns * load.requests)
		b.figure(fmt.Sprintf("serve: %d connections, processor time of the server", load.conns),
			fmt.Sprintf("%s an answer", ((after-before)/answers).Round(10*time.Microsecond)))
		peak, err := b.lab.PeakMemory(data)
		if err != nil {
			return err
		}
		b.atMost(fmt.Sprintf("serve: memory of the server after %d connections", load.conns), mib(peak), maxServeMemory>>20, "MiB")
	}
	return nil
}

// batchBodies are request bodies for all chunks of an image, in path order as a
// worker asks for neighbours.
func batchBodies(data string) (bodies [][]byte, err error) {
	boot, err := bootstrapOf(data)
	if err != nil {
		return nil, err
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		return nil, err
	}
	var ds []chunk.Digest
	size := int64(0)
	for i, c := range im.Blob.Chunks {
		ds, size = append(ds, c.Digest), size+int64(c.Len)
		if len(ds) == api.MaxBatch || size >= 2*answerBytes || i == len(im.Blob.Chunks)-1 {
			bodies = append(bodies, api.EncodeDigests(ds))
			ds, size = nil, 0
		}
	}
	return bodies, nil
}

// bootstrapOf returns the only bootstrap of a store.
func bootstrapOf(data string) ([]byte, error) {
	entries, err := os.ReadDir(data + "/bucket/bootstraps")
	if err != nil || len(entries) != 1 {
		return nil, fmt.Errorf("%d bootstraps in %s, want 1 (%w)", len(entries), data, err)
	}
	return os.ReadFile(data + "/bucket/bootstraps/" + entries[0].Name())
}

// recordAnswers asks for every batch once, which also has all packs in the page
// cache, checks that no chunk is left out, and keeps the answers one after another.
func recordAnswers(ctx context.Context, srv *lab.Server, bodies [][]byte, path string) (asks []exchangeable, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	off := int64(0)
	for _, body := range bodies {
		rq, err := http.NewRequestWithContext(ctx, http.MethodPost, srv.URL+"/v1/chunks:batchGet", bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		rq.Header.Set("Content-Type", api.TypeDigests)
		rq.Header.Set("Accept", batchAccept)
		size, err := recordAnswer(rq, f)
		if err != nil {
			return nil, err
		}
		asks = append(asks, exchangeable{
			quarry: fmt.Appendf(nil, "POST /v1/chunks:batchGet HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nAccept: %s\r\nContent-Length: %d\r\n\r\n%s", api.TypeDigests, batchAccept, len(body), body),
			nginx:  fmt.Appendf(nil, "GET /answers HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%d-%d\r\n\r\n", off, off+size-1),
			size:   size,
		})
		off += size
	}
	return asks, nil
}

func recordAnswer(rq *http.Request, w io.Writer) (int64, error) {
	res, err := http.DefaultClient.Do(rq)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("batchGet: %s", res.Status)
	}
	frames := api.NewFrameReader(io.TeeReader(res.Body, w), api.MaxBatch)
	for {
		f, err := frames.Next()
		if errors.Is(err, io.EOF) {
			return frames.Offset(), nil
		}
		if err != nil || f.Status != api.StatusOK {
			return 0, fmt.Errorf("batchGet: chunk %s has status %d: %s (%w)", f.Digest, f.Status, f.Reason, err)
		}
	}
}

// serveAt compares the servers with so many connections.
func (b *bench) serveAt(ctx context.Context, quarry, nginx string, asks []exchangeable, conns, requests int) error {
	var ratios, ours, theirs []float64
	var waits, peerWaits []time.Duration
	for range serveRounds {
		q, times, err := load(ctx, quarry, asks, conns, requests, func(e exchangeable) []byte { return e.quarry })
		if err != nil {
			return fmt.Errorf("quarry: %w", err)
		}
		waits = append(waits, times...)
		n, times, err := load(ctx, nginx, asks, conns, requests, func(e exchangeable) []byte { return e.nginx })
		if err != nil {
			return fmt.Errorf("nginx: %w", err)
		}
		peerWaits = append(peerWaits, times...)
		ratios, ours, theirs = append(ratios, q/n), append(ours, q), append(theirs, n)
	}
	b.figure(fmt.Sprintf("serve: %d connections, quarry and nginx", conns),
		fmt.Sprintf("%.0f and %.0f MB/s; a request p50 %s p99 %s and p50 %s p99 %s", median(ours)/1e6, median(theirs)/1e6,
			quantile(waits, 50), quantile(waits, 99), quantile(peerWaits, 50), quantile(peerWaits, 99)))
	b.atLeast(fmt.Sprintf("serve: %d connections, bytes a second ÷ nginx", conns), median(ratios), minServe, "×")
	return nil
}

// load has each of some connections make its requests and returns the bytes of
// bodies a second, and how long each request took.
func load(ctx context.Context, addr string, asks []exchangeable, conns, requests int, wire func(exchangeable) []byte) (float64, []time.Duration, error) {
	times := make([][]time.Duration, conns)
	var g errgroup.Group
	clients := make([]*bareClient, conns)
	for i := range clients {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		if err != nil {
			return 0, nil, err
		}
		defer conn.Close()
		clients[i] = newBareClient(conn)
	}
	total := int64(0)
	started := time.Now()
	for i, c := range clients {
		for j := range requests {
			total += asks[(i*requests+j)%len(asks)].size
		}
		g.Go(func() error {
			for j := range requests {
				e := asks[(i*requests+j)%len(asks)]
				begun := time.Now()
				if err := c.exchange(wire(e), e.size); err != nil {
					return err
				}
				times[i] = append(times[i], time.Since(begun))
			}
			return nil
		})
	}
	err := g.Wait()
	return float64(total) / time.Since(started).Seconds(), slices.Concat(times...), err
}

// quantile returns the value below which percent of the values are.
func quantile(values []time.Duration, percent int) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)].Round(10 * time.Microsecond)
}
