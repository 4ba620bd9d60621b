package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"quarry/api"
	"quarry/e2e/lab"
	"quarry/e2e/lab/proxy"
	"quarry/e2e/lab/traffic"
	"quarry/rafs"
	"quarry/store/chunk"
)

// cost is what one cold start cost.
type cost struct {
	seconds  float64
	wire     int64 // bytes between worker and store, both ways
	requests int
	stored   int64 // bytes of the chunks that came, as stored
	plain    int64 // the same, as the files have them
}

// costOf counts what a worker asked of the store. Records of runs, which it
// sends when nobody waits any more, are not part of a start.
func costOf(exchanges []proxy.Exchange) (cost, error) {
	var c cost
	for _, e := range exchanges {
		if traffic.IsRecord(e) {
			continue
		}
		c.requests++
		chunks, err := traffic.Chunks(e)
		if err != nil {
			return c, err
		}
		c.add(chunks)
	}
	return c, nil
}

func (c *cost) add(chunks []traffic.Chunk) {
	for _, k := range chunks {
		c.stored += k.Stored
		c.plain += k.Plain
	}
}

// touched is what a command needs at least.
type touched struct {
	pages  int   // of files
	chunks int   // that hold one of them
	stored int64 // bytes of those chunks, as stored
	device int64 // bytes read from the device, its metadata included
}

// touch runs a command on a device without read-ahead and looks which pages it
// left in the page cache.
func (c *cold) touch(ctx context.Context, image string, cmd command) (t touched, err error) {
	dir, flags := c.worker(c.server.URL)
	defer func() { err = errors.Join(err, c.leave(dir)) }()
	flags = append(flags, "--read-ahead", "0")
	// Which keeps the page cache beyond the run's own mount.
	mount := dir + ".mount"
	if err := os.Mkdir(mount, 0o755); err != nil {
		return t, err
	}
	if _, err := c.lab.Quarry(ctx, append(append([]string{"mount"}, flags...), image, mount)...); err != nil {
		return t, err
	}
	defer func() {
		_, umountErr := c.lab.Quarry(context.WithoutCancel(ctx), "umount", "--worker-dir", dir, mount)
		err = errors.Join(err, umountErr)
	}()
	_, st, err := c.lab.Run(ctx, append(flags, "--no-trace"), image, cmd.args...)
	if err != nil {
		return t, err
	}
	t.device = st.DeviceBytes
	files, err := chunksOf(dir)
	if err != nil {
		return t, err
	}
	chunks := map[chunk.Digest]bool{}
	err = filepath.WalkDir(mount, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		digests := files[strings.TrimPrefix(path, mount)]
		delete(files, strings.TrimPrefix(path, mount))
		pages, err := lab.Resident(path)
		for i, there := range pages {
			if there {
				t.pages++
				chunks[digests[i*os.Getpagesize()/chunk.DefaultSize]] = true
			}
		}
		return err
	})
	if err != nil {
		return t, err
	}
	t.chunks = len(chunks)
	t.stored, err = c.storedBytes(ctx, chunks)
	return t, err
}

// chunksOf returns the chunks of every file of the one image in a worker folder,
// by its path; of the first only, where a file has several.
func chunksOf(worker string) (map[string][]chunk.Digest, error) {
	found, err := filepath.Glob(filepath.Join(worker, "images", "*", "bootstrap"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("%d bootstraps in %s, want 1 (%w)", len(found), worker, err)
	}
	raw, err := os.ReadFile(found[0])
	if err != nil {
		return nil, err
	}
	im, err := rafs.Decode(raw)
	if err != nil {
		return nil, err
	}
	files := map[string][]chunk.Digest{}
	err = im.Walk(func(path string, n *rafs.Inode) error {
		if n.IsRegular() {
			files["/"+strings.TrimPrefix(path, "/")] = n.Chunks
		}
		return nil
	})
	return files, err
}

// storedBytes asks the store for chunks and adds up their stored lengths.
func (c *cold) storedBytes(ctx context.Context, chunks map[chunk.Digest]bool) (int64, error) {
	var digests []chunk.Digest
	for d := range chunks {
		digests = append(digests, d)
	}
	var sum cost
	for len(digests) > 0 {
		n := min(len(digests), api.MaxBatch)
		rq, err := http.NewRequestWithContext(ctx, http.MethodPost, c.server.URL+"/v1/chunks:batchGet", bytes.NewReader(api.EncodeDigests(digests[:n])))
		if err != nil {
			return 0, err
		}
		rq.Header.Set("Content-Type", "application/vnd.quarry.digests.v1")
		res, err := http.DefaultClient.Do(rq)
		if err != nil {
			return 0, err
		}
		answer, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err == nil && res.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", res.Status, answer)
		}
		var came []traffic.Chunk
		if err == nil {
			came, err = traffic.Batch(answer)
		}
		sum.add(came)
		if err != nil {
			return 0, fmt.Errorf("ask the store for stored lengths: %w", err)
		}
		digests = digests[n:]
	}
	return sum.stored, nil
}
