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
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"quarry/e2e/lab"
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
func (c *cold) fullRead(ctx context.Context) (err error) {
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
	unpacked, unmount, err := c.freshDisk(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unmount()) }()
	var read, download, requests []float64
	for range rounds {
		took, err := c.download(ctx, plain, unpacked)
		if err != nil {
			return err
		}
		download = append(download, took.Seconds())
		took, asked, err := c.readAll(ctx, store)
		if err != nil {
			return err
		}
		read, requests = append(read, took.Seconds()), append(requests, asked)
	}
	name := fmt.Sprintf("read of the whole image, %s: ", gateRTT)
	c.b.figure(name+"time, and of download and unpack", fmt.Sprintf("%.2f s, %.2f s", median(read), median(download)))
	c.b.figure(name+"requests", fmt.Sprint(median(requests)))
	c.b.atMost(name+"÷ download and unpack", median(read)/median(download), maxFull, "×")
	return nil
}

// freshDisk mounts a new ext4, in a file on the lab's disk: for minutes after many
// files were deleted, as whatever ran before did, an ext4 looks for what became of
// each before it makes another, and tar takes two to four times as long.
func (c *cold) freshDisk(ctx context.Context) (dir string, unmount func() error, err error) {
	file, dir := c.lab.Path("disk"), c.lab.Path("unpacked")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", nil, err
	}
	for _, args := range [][]string{
		{"truncate", "-s", "16G", file},
		{"mkfs.ext4", "-q", "-E", "lazy_itable_init=1", file},
		{"mount", "-o", "loop", file, dir},
	} {
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			return "", nil, fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return dir, func() error { return errors.Join(unix.Unmount(dir, 0), os.Remove(file), os.Remove(dir)) }, nil
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

// download downloads the layers through p and unpacks them into a new folder
// below a folder.
func (c *cold) download(ctx context.Context, p *proxy.Proxy, below string) (took time.Duration, err error) {
	dir, err := os.MkdirTemp(below, "")
	if err != nil {
		return 0, err
	}
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

// readAll mounts the image and reads every file. The reader counts its requests:
// to record them would take the processors a tenth of the time that is measured.
func (c *cold) readAll(ctx context.Context, p *proxy.Proxy) (took time.Duration, requests float64, err error) {
	dir, flags := c.worker(p.URL())
	defer func() { err = errors.Join(err, c.leave(dir)) }()
	mount := dir + ".mount"
	if err := os.Mkdir(mount, 0o755); err != nil {
		return 0, 0, err
	}
	started := time.Now()
	if _, err := c.lab.Quarry(ctx, append(append([]string{"mount", "--no-trace"}, flags...), coldImage, mount)...); err != nil {
		return 0, 0, err
	}
	defer func() {
		_, umountErr := c.lab.Quarry(context.WithoutCancel(ctx), "umount", "--worker-dir", dir, mount)
		err = errors.Join(err, umountErr)
	}()
	// In a process of its own, as tar is: this one is busy as the network.
	if out, err := exec.CommandContext(ctx, "/proc/self/exe", readTreeWord, mount).CombinedOutput(); err != nil {
		return 0, 0, fmt.Errorf("read %s: %w: %s", mount, err, out)
	}
	took = time.Since(started)
	requests, err = lab.ReaderMetric(ctx, dir, "quarry_reader_requests_total", "")
	return took, requests, err
}

// readTreeWord, and a folder, as arguments have this program do nothing but readTree.
const readTreeWord = "read-tree"

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
