package blockdev_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/store/chunk"
)

// The files of testdata are written by e2e/record: the shape of a Debian image,
// and which pages of it two commands read on a cold mount. Here the same pages are
// read of made-up content of that shape, so that the counts are exact.

// lines calls fn with the numbers of every line of a file of testdata.
func lines(t testing.TB, name string, fn func(line string)) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	s := bufio.NewScanner(z)
	for s.Scan() {
		fn(s.Text())
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
}

// shaped is a store with made-up content of the image's shape. It counts what is
// asked of it.
type shaped struct {
	boot   []byte
	img    *rafs.Image
	stored []int64 // by chunk number
	number map[chunk.Digest]int
	serial []uint64 // by chunk number; what the content is made from

	requests, wire int64 // wire in stored bytes
}

// loadShape makes the image.
func loadShape(t testing.TB) *shaped {
	t.Helper()
	s := &shaped{number: map[chunk.Digest]int{}}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	var dir *rafs.Inode
	ofLength := map[int]uint64{}
	lines(t, "image.txt.gz", func(line string) {
		var plain int
		var stored int64
		var mark string
		if n, _ := fmt.Sscan(line, &plain, &stored, &mark); n < 2 {
			t.Fatalf("image.txt.gz: line %q", line)
		}
		if mark == "d" {
			dir = &rafs.Inode{Mode: rafs.ModeDir | 0o755}
			root.Entries = append(root.Entries, rafs.Dirent{Name: fmt.Sprintf("d%06d", len(root.Entries)), Inode: dir})
		}
		serial := ofLength[plain] // two chunks of one length differ
		ofLength[plain]++
		d := chunk.Sum(content(serial, plain))
		s.number[d] = len(s.stored)
		s.stored, s.serial = append(s.stored, stored), append(s.serial, serial)
		f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(plain), Chunks: []chunk.Digest{d}}
		dir.Entries = append(dir.Entries, rafs.Dirent{Name: fmt.Sprintf("f%06d", len(dir.Entries)), Inode: f})
	})
	var err error
	if s.boot, err = rafs.Encode(&rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root}); err != nil {
		t.Fatal(err)
	}
	if s.img, err = rafs.Decode(s.boot); err != nil {
		t.Fatal(err)
	}
	if got := len(s.img.Blob.Chunks); got != len(s.stored) {
		t.Fatalf("the made-up image has %d chunks, want %d", got, len(s.stored))
	}
	return s
}

func content(serial uint64, length int) []byte {
	p := make([]byte, max(length, 8))
	binary.LittleEndian.PutUint64(p, serial)
	return p[:length]
}

func (s *shaped) plain(i int) []byte { return content(s.serial[i], int(s.img.Blob.Chunks[i].Len)) }

// GetBatch implements store.BatchGetter.
func (s *shaped) GetBatch(_ context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	s.requests++
	for _, d := range ds {
		i := s.number[d]
		s.wire += s.stored[i]
		if err := fn(d, s.plain(i), nil); err != nil {
			return err
		}
	}
	return nil
}

// pages are the pages of one recorded read.
type pages struct{ off, length int64 }

func (s *shaped) recorded(t testing.TB, name string) (reads []pages) {
	t.Helper()
	lines(t, name, func(line string) {
		var i, block, blocks int64
		if n, err := fmt.Sscan(line, &i, &block, &blocks); n != 3 || i >= int64(len(s.stored)) {
			t.Fatalf("%s: line %q: %v", name, line, err)
		}
		reads = append(reads, pages{s.img.Blob.MappedOff + s.img.Blob.Chunks[i].DevOff + block*4096, blocks * 4096})
	})
	if len(reads) < 100 {
		t.Fatalf("%s has only %d reads", name, len(reads))
	}
	return reads
}

// replay reads the pages one after another, each when everything that the reads
// before have set off is done, and checks the bytes.
func (s *shaped) replay(t *testing.T, d *blockdev.Device, reads []pages) {
	t.Helper()
	chunks := s.img.Blob.Chunks
	for _, r := range reads {
		p := make([]byte, r.length)
		if err := d.ReadAt(t.Context(), p, r.off); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for i := s.chunkAt(r.off); i < len(chunks) && chunks[i].DevOff+s.img.Blob.MappedOff < r.off+r.length; i++ {
			want := make([]byte, (int64(chunks[i].Len)+4095)&^4095)
			copy(want, s.plain(i))
			at := s.img.Blob.MappedOff + chunks[i].DevOff - r.off
			if at < 0 {
				want, at = want[-at:], 0
			}
			if n := min(int64(len(want)), r.length-at); !bytes.Equal(p[at:at+n], want[:n]) {
				t.Fatalf("read of %d at %d gives other bytes than chunk %d", r.length, r.off, i)
			}
		}
	}
}

func (s *shaped) chunkAt(off int64) int {
	i := 0
	for k, c := range s.img.Blob.Chunks {
		if c.DevOff+s.img.Blob.MappedOff > off {
			break
		}
		i = k
	}
	return i
}

// cost is what a replay cost.
type cost struct {
	requests  int64
	wire      int64
	overFetch float64
}

// cost reckons with the stored bytes of the chunks that hold a touched page.
func (s *shaped) cost(t *testing.T, touched []uint32) cost {
	var sum int64
	for _, i := range touched {
		sum += s.stored[i]
	}
	c := cost{s.requests, s.wire, float64(s.wire) / float64(sum)}
	t.Logf("%d requests, %d stored bytes, over-fetch %.3f; %d chunks touched, of %d stored bytes", c.requests, c.wire, c.overFetch, len(touched), sum)
	return c
}

// within fails when a cost is above what it was when the figure was written down,
// by more than a twentieth, or above what is allowed.
func (c cost) within(t *testing.T, was, limit cost) {
	t.Helper()
	if float64(c.requests) > float64(was.requests)*1.05 || c.requests > limit.requests {
		t.Errorf("%d requests, want %d and at most 5 %% more, never more than %d", c.requests, was.requests, limit.requests)
	}
	if float64(c.wire) > float64(was.wire)*1.05 {
		t.Errorf("%d stored bytes, want %d and at most 5 %% more", c.wire, was.wire)
	}
	if c.overFetch > limit.overFetch {
		t.Errorf("over-fetch %.2f, want at most %.2f", c.overFetch, limit.overFetch)
	}
}

// replayed runs a recorded command on a fresh device, after prepare.
func replayed(t *testing.T, name string, prepare func(*testing.T, *shaped, *blockdev.Device, []uint32)) (c cost) {
	s := loadShape(t)
	reads := s.recorded(t, name)
	synctest.Test(t, func(t *testing.T) {
		var touched []uint32
		d, err := blockdev.New(blockdev.Config{Bootstrap: s.boot, Image: s.img, Chunks: s, OnTouch: func(i int) { touched = append(touched, uint32(i)) }})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if prepare != nil {
			prepare(t, s, d, s.trace(reads))
		}
		s.replay(t, d, reads)
		c = s.cost(t, touched)
	})
	return c
}

// trace lists the chunks that the reads touch, in the order of the first touch.
func (s *shaped) trace(reads []pages) (numbers []uint32) {
	seen := map[int]bool{}
	for _, r := range reads {
		chunks := s.img.Blob.Chunks
		for i := s.chunkAt(r.off); i < len(chunks) && chunks[i].DevOff+s.img.Blob.MappedOff < r.off+r.length; i++ {
			if !seen[i] {
				seen[i] = true
				numbers = append(numbers, uint32(i))
			}
		}
	}
	return numbers
}

func TestReplayWithoutTrace(t *testing.T) {
	limit := cost{requests: 150, overFetch: 2.2}
	for name, was := range map[string]cost{
		"pip-version":  {requests: 111, wire: 16163750},
		"python-print": {requests: 44, wire: 4820960},
	} {
		t.Run(name, func(t *testing.T) { replayed(t, name+".txt.gz", nil).within(t, was, limit) })
	}
}

// TestReplayWithTrace brings the first chunks of a trace as a start stream does,
// and fetches the others ahead.
func TestReplayWithTrace(t *testing.T) {
	for name, c := range map[string]struct {
		brought  int
		requests int64
	}{
		"all of it":       {1 << 30, 0},
		"the first 4 MiB": {4 << 20, 6},
		"nothing":         {0, 7},
	} {
		brought, was := c.brought, cost{requests: c.requests, wire: 11039285}
		t.Run(name, func(t *testing.T) {
			c := replayed(t, "pip-version.txt.gz", func(t *testing.T, s *shaped, d *blockdev.Device, trace []uint32) {
				e := d.Expect(trace)
				for len(trace) > 0 && brought >= len(s.plain(int(trace[0]))) {
					i := int(trace[0])
					brought -= len(s.plain(i))
					s.wire += s.stored[i]
					if err := e.Deliver(s.img.Blob.Chunks[i].Digest, s.plain(i)); err != nil {
						t.Fatal(err)
					}
					trace = trace[1:]
				}
				e.End()
				if err := d.Prefetch(t.Context(), trace); err != nil {
					t.Fatal(err)
				}
			})
			c.within(t, was, cost{requests: 10, overFetch: 1.1})
		})
	}
}

// TestReplayOfAFullRead reads the whole device as the kernel does for a program
// that reads all files: every chunk is fetched once, in few requests.
func TestReplayOfAFullRead(t *testing.T) {
	s := loadShape(t)
	synctest.Test(t, func(t *testing.T) {
		d, err := blockdev.New(blockdev.Config{Bootstrap: s.boot, Image: s.img, Chunks: s})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		var all int64
		for _, n := range s.stored {
			all += n
		}
		var reads []pages
		const step = 128 << 10 // the kernel's read-ahead
		for off := s.img.Blob.MappedOff; off < d.Size(); off += step {
			reads = append(reads, pages{off, min(step, d.Size()-off)})
		}
		s.replay(t, d, reads)
		if s.wire != all {
			t.Errorf("%d stored bytes, want each chunk once, %d", s.wire, all)
		}
		cost{requests: s.requests, wire: s.wire}.within(t, cost{requests: 59, wire: all}, cost{requests: 100})
	})
}
