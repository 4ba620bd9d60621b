package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/e2e/lab"
	"quarry/e2e/lab/proxy"
	"quarry/e2e/lab/traffic"
	"quarry/store/bucket/s3/s3test"
	"quarry/store/chunk"
)

const (
	burstWorkers = 256
	burstImage   = "bench/burst"
	// burstBatch is how many chunks a worker asks for at once, at most.
	burstBatch = 128
	// bucketDelay is what an object store takes to begin an answer.
	bucketDelay = 20 * time.Millisecond
)

// wants is what a worker that starts a command cold asks a store for, in its order.
type wants struct {
	digests []chunk.Digest
	stored  int64 // bytes of the chunks
}

// measureBurst has many workers ask a node for one image at once that the node, whose
// bucket is in S3, has never read, and counts what is read of the bucket.
func measureBurst(ctx context.Context, b *bench) (err error) {
	program, err := exec.LookPath("versitygw")
	if err != nil {
		return fmt.Errorf("no S3 server: %w: run this through make", err)
	}
	root := b.lab.Path("s3")
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	for _, v := range s3test.Env() {
		name, value, _ := strings.Cut(v, "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	server, err := s3test.Start(program, root)
	if err != nil {
		return err
	}
	defer server.Stop()
	name, err := server.NewBucket()
	if err != nil {
		return err
	}
	want, err := b.burstWants(ctx, bucketURL(name, server.URL))
	if err != nil {
		return err
	}
	front, end, err := s3test.StartProxy(server.URL)
	if err != nil {
		return err
	}
	defer end()
	data, flags := b.lab.Path("burst.node"), []string{"--no-auth", "--read-only", "--bucket", bucketURL(name, front.URL)}
	for _, round := range []struct {
		name string
		cold bool
	}{{"cold", true}, {"again, after a restart", false}} {
		node, err := b.lab.Serve(ctx, data, flags...)
		if err != nil {
			return err
		}
		err = b.burst(ctx, node, front, data, want, round.name, round.cold)
		if err := errors.Join(err, node.Stop()); err != nil {
			return err
		}
	}
	return nil
}

func bucketURL(name, endpoint string) string {
	return fmt.Sprintf("s3://%s?endpoint=%s", name, url.QueryEscape(endpoint))
}

// burstWants converts the image into the bucket and records what a worker asks for.
func (b *bench) burstWants(ctx context.Context, bucket string) (w wants, err error) {
	data := b.lab.Path("burst")
	srv, err := b.lab.Serve(ctx, data, "--no-auth", "--bucket", bucket)
	if err != nil {
		return w, err
	}
	defer func() { err = errors.Join(err, srv.Stop()) }()
	if _, err := b.lab.Convert(ctx, data, "oci:"+b.images[0].dir, burstImage); err != nil {
		return w, err
	}
	p, err := proxy.New(proxy.Config{Target: srv.Addr()})
	if err != nil {
		return w, err
	}
	defer p.Close()
	p.Record()
	dir := b.lab.Path("burst.w")
	flags := []string{"--no-trace", "--store", p.URL(), "--trust", data + "/keys/signing.pub", "--worker-dir", dir}
	if _, _, err := b.lab.Run(ctx, flags, burstImage, wireArgs...); err != nil {
		return w, err
	}
	if err := b.lab.EndBelow(dir); err != nil {
		return w, err
	}
	exchanges, err := p.Exchanges()
	if err != nil {
		return w, err
	}
	seen := map[chunk.Digest]bool{}
	for _, e := range exchanges {
		chunks, err := traffic.Chunks(e)
		if err != nil {
			return w, err
		}
		for _, k := range chunks {
			if !seen[k.Digest] {
				seen[k.Digest] = true
				w.digests, w.stored = append(w.digests, k.Digest), w.stored+k.Stored
			}
		}
	}
	if len(w.digests) == 0 {
		return w, errors.New("the worker asked for no chunk")
	}
	return w, nil
}

// reads counts the requests for packs that pass a proxy.
type reads struct {
	mu    sync.Mutex // guards all
	seen  map[string]map[int64]bool
	n     int
	again int // that ask for a byte which an earlier one has asked for
	bytes int64
	other int // requests for anything else
}

// rule notes a request, and keeps it as long as an object store would.
func (r *reads) rule(rq *http.Request) s3test.Fault {
	time.Sleep(bucketDelay)
	r.mu.Lock()
	defer r.mu.Unlock()
	_, pack, ok := strings.Cut(rq.URL.Path, "/packs/")
	var from, to int64
	if n, _ := fmt.Sscanf(rq.Header.Get("Range"), "bytes=%d-%d", &from, &to); !ok || n != 2 {
		r.other++
		return s3test.None
	}
	if r.seen[pack] == nil {
		r.seen[pack] = map[int64]bool{}
	}
	const unit = 4 << 10
	again := false
	for at := from / unit; at <= to/unit; at++ {
		again = again || r.seen[pack][at]
		r.seen[pack][at] = true
	}
	r.n, r.bytes = r.n+1, r.bytes+to-from+1
	if again {
		r.again++
	}
	return s3test.None
}

// burst has all workers ask a node, and judges what was read of the bucket.
func (b *bench) burst(ctx context.Context, node *lab.Server, front *s3test.Proxy, data string, want wants, name string, cold bool) error {
	name = "burst: " + name
	r := &reads{seen: map[string]map[int64]bool{}}
	front.Rule(r.rule)
	defer front.Rule(nil)
	var g errgroup.Group
	var mu sync.Mutex // guards times and all
	var times, all []time.Duration
	for i := range burstWorkers {
		g.Go(func() error {
			begun := time.Now()
			took, err := askAll(ctx, node.URL, want, rand.New(rand.NewPCG(uint64(i), 1)))
			mu.Lock()
			defer mu.Unlock()
			times, all = append(times, took...), append(all, time.Since(begun))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	front.Rule(nil)
	second := 0.0
	for _, series := range []string{"quarry_s3_hedges_total", "quarry_s3_retries_total"} {
		n, err := node.Metric(ctx, series)
		if err != nil {
			return err
		}
		second += n
	}
	peak, err := b.lab.PeakMemory(data)
	if err != nil {
		return err
	}
	b.figure(fmt.Sprintf("%s: %d workers, a batch p50 and p99; the last has all", name, burstWorkers),
		fmt.Sprintf("%s and %s; %s", quantile(times, 50), quantile(times, 99), quantile(all, 100)))
	b.figure(name+": memory of the node", fmt.Sprintf("%.0f MiB", mib(peak)))
	b.figure(name+": reads of packs, requests for anything else", fmt.Sprintf("%d and %d; %.0f slow or failed ones made again", r.n, r.other, second))
	if cold {
		b.figure(name+": bytes of packs read ÷ bytes of the chunks that a worker needs",
			fmt.Sprintf("%.2f (%.1f MB for %d chunks of %.1f MB)", float64(r.bytes)/float64(want.stored), float64(r.bytes)/1e6, len(want.digests), float64(want.stored)/1e6))
		b.atMost(name+": reads of a byte that was read before, but for those made again", max(0, float64(r.again)-second), 0, "reads")
		b.atLeast(name+": reads of packs", float64(r.n), 1, "reads")
		return nil
	}
	b.atMost(name+": reads of packs", float64(r.n), 0, "reads")
	return nil
}

// askAll asks for what a worker wants, in batches of its own, and returns how long each
// took.
func askAll(ctx context.Context, store string, want wants, rnd *rand.Rand) (times []time.Duration, err error) {
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: exchangeTimeout}
	for left := want.digests; len(left) > 0; {
		ds := left[:min(len(left), 1+rnd.IntN(burstBatch))]
		left = left[len(ds):]
		begun := time.Now()
		if err := ask(ctx, client, store, ds); err != nil {
			return nil, err
		}
		times = append(times, time.Since(begun))
	}
	return times, nil
}

func ask(ctx context.Context, client *http.Client, store string, ds []chunk.Digest) error {
	rq, err := http.NewRequestWithContext(ctx, http.MethodPost, store+"/v1/chunks:batchGet", bytes.NewReader(api.EncodeDigests(ds)))
	if err != nil {
		return err
	}
	rq.Header.Set("Content-Type", api.TypeDigests)
	res, err := client.Do(rq)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		return fmt.Errorf("batchGet: %s (%w)", res.Status, err)
	}
	chunks, err := traffic.Batch(answer)
	if err == nil && len(chunks) != len(ds) {
		err = fmt.Errorf("batchGet: %d of %d chunks came", len(chunks), len(ds))
	}
	return err
}
