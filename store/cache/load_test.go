package cache_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"quarry/store"
	"quarry/store/cache"
	"quarry/store/chunk"
)

// plant makes a folder of files, as if they had always been there.
func plant(files map[string][]byte) *memFS {
	m := newMemFS()
	for name, b := range files {
		f := &inode{b, b, true}
		m.names[name], m.synced[name] = f, f
	}
	return m
}

func fileNames(m *memFS) []string {
	var names []string
	for name := range m.names {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func TestFilesOfNoUseAreDeletedAndForeignOnesLeft(t *testing.T) {
	n := name(content(1, 5000))
	data := append(bytes.Clone(n.p), make([]byte, 8192-5000)...)
	index := cache.EncodeIndex(2, 0, cache.RawEntry{Digest: n.Digest, Len: 5000})
	other := bytes.Clone(index)
	other[8] = 2
	m := plant(map[string][]byte{
		"0000000000000002.chunks": data, "0000000000000002.index": index,
		"0000000000000003.chunks": data, // no sidecar
		"0000000000000004.index":  index,
		"0000000000000005.chunks": data, "0000000000000005.index": index, // another's sidecar
		"0000000000000006.chunks": data, "0000000000000006.index": other, // another version
		"0000000000000007.chunks": data, "0000000000000007.index": make([]byte, 1<<20),
		chunk.Digest{1}.Hex() + ".pin": cache.EncodePin(chunk.Digest{2}),
		"notes.txt":                    data, "ffffffffffffffff.chunks": data, "7.index": data, "x.pin": data,
	})
	log := &lines{}
	c := open(t, cache.Config{FS: m, Log: slog.New(slog.NewTextHandler(log, nil))})
	if !has(t, c, n) || c.Stats().Chunks != 1 {
		t.Error("the good segment is not used")
	}
	want := []string{"0000000000000002.chunks", "0000000000000002.index", "7.index", "ffffffffffffffff.chunks", "notes.txt", "x.pin"}
	if got := fileNames(m); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	for _, says := range []string{"version 2, not 1", "segment=6", "damaged", "damaged list of a pinned image deleted"} {
		if !strings.Contains(log.String(), says) {
			t.Errorf("the log does not say %q:\n%s", says, log.String())
		}
	}
	put(t, c, chunks(5, 30, 200_000)...)
	for _, name := range fileNames(m) {
		if strings.HasPrefix(name, "0000000000000007") {
			t.Error("the name of a deleted segment is used again")
		}
	}
}

// TestASegmentIsFilledOn restarts a cache often: that makes no more files, and
// what a crash left behind the last entry is written over.
func TestASegmentIsFilledOn(t *testing.T) {
	dir := t.TempDir()
	all := chunks(0, 20, 30_000)
	for i, n := range all {
		c := open(t, cache.Config{Dir: dir})
		put(t, c, n)
		c.OfferSpeculative(chunk.Sum(content(i+1000, 9)), content(i+1000, 9))
		closed(t, c)
		if i%3 == 0 { // a torn entry, and data without one
			for _, f := range []string{"0000000000000001.index", "0000000000000001.chunks"} {
				grow(t, filepath.Join(dir, f), []byte("torn"))
			}
		}
	}
	c := open(t, cache.Config{Dir: dir})
	if got := count(t, c, all); got != len(all) || c.Stats().Segments != 2 || c.Stats().Chunks != 40 {
		t.Errorf("%d of %d chunks are there: %+v", got, len(all), c.Stats())
	}
	for _, n := range all {
		has(t, c, n)
	}
}

func grow(t *testing.T, path string, by []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(by); err != nil {
		t.Fatal(err)
	}
}

// FuzzOpen opens folders of arbitrary files: it never fails for what is in them,
// and no more is read than is there, or kept than the limit allows.
func FuzzOpen(f *testing.F) {
	d := chunk.Sum([]byte("one"))
	good := cache.EncodeIndex(1, 0, cache.RawEntry{Digest: d, Len: 3}, cache.RawEntry{Digest: chunk.Sum([]byte("x")), Page: 1, Len: 5000, State: 1})
	pin := cache.EncodePin(chunk.Digest{}, cache.Chunk{Digest: d, Len: 3})
	f.Add(good, pin, uint32(12288), uint32(0), uint32(3), uint32(0), byte(0))
	f.Add(good, pin, uint32(1), uint32(0), uint32(3), uint32(1), byte(1))
	f.Add(good[:70], pin[:30], uint32(40<<20), uint32(5), uint32(8<<20), uint32(0), byte(2))
	f.Fuzz(func(t *testing.T, index, pin []byte, size, page, length, cl uint32, st byte) {
		data := make([]byte, size%(80<<20))
		m := plant(map[string][]byte{
			"0000000000000001.chunks": data, "0000000000000001.index": index,
			"0000000000000002.chunks":     data,
			"0000000000000002.index":      cache.EncodeIndex(2, cl, cache.RawEntry{Digest: d, Page: page, Len: length, State: st}),
			chunk.Digest{}.Hex() + ".pin": pin,
		})
		c, err := cache.Open(cache.Config{FS: m, Limit: cache.MinLimit})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{0, 3, 5000, int(length % (9 << 20))} {
			err := c.ReadAt(d, make([]byte, n), 0)
			if err != nil && !errors.Is(err, store.ErrNotFound) {
				t.Fatal(err)
			}
		}
		n := name([]byte(fmt.Sprint(index)))
		if len(n.p) > 0 && len(n.p) <= chunk.DefaultSize {
			put(t, c, n)
			if !has(t, c, n) {
				t.Fatal("a new chunk is not there")
			}
		}
		c.Pinned()
		closed(t, c)
		if now, _ := m.took(); now > cache.MinLimit {
			t.Fatalf("the files take %d bytes", now)
		}
	})
}
