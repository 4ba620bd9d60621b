package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"quarry/e2e/lab/proxy"
)

// maxFull is how long a read of the whole image may take, compared with a plain
// download and unpack.
const maxFull = 1.2

func measureFullRead(ctx context.Context, b *bench) error {
	c, err := b.coldStore(ctx)
	if err != nil {
		return err
	}
	return c.serving(ctx, func() error { return c.fullRead(ctx) })
}

// fullRead compares a read of the whole image on a worker that has never seen it
// with a plain download of its layers, unpacked as they come.
func (c *cold) fullRead(ctx context.Context) error {
	store, err := c.network(gateRTT)
	if err != nil {
		return err
	}
	defer store.Close()
	blobs, stop, err := serveFiles(c.layout.layers)
	if err != nil {
		return err
	}
	defer stop()
	plain, err := proxy.New(proxy.Config{Target: blobs, RTT: gateRTT, BitsPerSecond: proxy.Gigabit})
	if err != nil {
		return err
	}
	defer plain.Close()
	var read, download []float64
	var requests int
	for range rounds {
		took, err := c.download(ctx, plain)
		if err != nil {
			return err
		}
		download = append(download, took.Seconds())
		store.Record()
		if took, err = c.readAll(ctx, store); err != nil {
			return err
		}
		read = append(read, took.Seconds())
		exchanges, err := store.Exchanges()
		if err != nil {
			return err
		}
		requests = len(exchanges)
	}
	name := fmt.Sprintf("read of the whole image, %s: ", gateRTT)
	c.b.figure(name+"time, and of download and unpack", fmt.Sprintf("%.2f s, %.2f s", median(read), median(download)))
	c.b.figure(name+"requests", fmt.Sprint(requests))
	c.b.atMost(name+"÷ download and unpack", median(read)/median(download), maxFull, "×")
	return nil
}

// serveFiles serves files by their number.
func serveFiles(paths []string) (addr string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	for i, path := range paths {
		mux.HandleFunc(fmt.Sprintf("GET /%d", i), func(w http.ResponseWriter, q *http.Request) { http.ServeFile(w, q, path) })
	}
	server := &http.Server{Handler: mux}
	go server.Serve(l) // ends with stop
	return l.Addr().String(), func() { server.Close() }, nil
}

func (c *cold) download(ctx context.Context, p *proxy.Proxy) (took time.Duration, err error) {
	dir, err := os.MkdirTemp(c.lab.Dir, "unpacked")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	started := time.Now()
	for i := range c.layout.layers {
		rq, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s/%d", p.URL(), i), nil)
		if err != nil {
			return 0, err
		}
		res, err := client.Do(rq)
		if err != nil {
			return 0, err
		}
		tar := exec.CommandContext(ctx, "tar", "-C", dir, "-xzpf", "-")
		tar.Stdin = res.Body
		out, err := tar.CombinedOutput()
		res.Body.Close()
		if err != nil {
			return 0, fmt.Errorf("unpack: %w: %s", err, out)
		}
	}
	return time.Since(started), nil
}

// readAll mounts the image and reads every file.
func (c *cold) readAll(ctx context.Context, p *proxy.Proxy) (took time.Duration, err error) {
	dir, flags := c.worker(p.URL())
	defer func() { err = errors.Join(err, c.leave(dir)) }()
	mount := dir + ".mount"
	if err := os.Mkdir(mount, 0o755); err != nil {
		return 0, err
	}
	started := time.Now()
	if _, err := c.lab.Quarry(ctx, append(append([]string{"mount"}, flags...), coldImage, mount)...); err != nil {
		return 0, err
	}
	defer func() {
		_, umountErr := c.lab.Quarry(context.WithoutCancel(ctx), "umount", "--worker-dir", dir, mount)
		err = errors.Join(err, umountErr)
	}()
	if err := readTree(mount); err != nil {
		return 0, err
	}
	return time.Since(started), nil
}

// readTree reads every file below a folder, one after another.
func readTree(root string) error {
	buf := make([]byte, 1<<20)
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buf)
		return err
	})
}
