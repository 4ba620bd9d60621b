//go:build interop

package interop_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"quarry/rafs"
	"quarry/store/chunk"
)

// faulty stands between nydusd and the server, and changes what passes.
type faulty struct {
	flip   int64 // the byte of the blob with one bit turned; -1: none
	broken atomic.Bool
	hits   atomic.Int64 // answers that were changed
}

func (f *faulty) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.broken.Load() {
		f.hits.Add(1)
		http.Error(w, "broken on purpose", http.StatusServiceUnavailable)
		return
	}
	rq, err := http.NewRequestWithContext(r.Context(), r.Method, shared.server.URL+r.URL.Path, nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	rq.Header = r.Header.Clone()
	resp, err := http.DefaultClient.Do(rq)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	for key, values := range resp.Header {
		w.Header()[key] = values
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if at := f.flip - rangeStart(r); f.flip >= 0 && at >= 0 && at < int64(len(body)) {
		body[at] ^= 0x10
		f.hits.Add(1)
	}
	w.WriteHeader(resp.StatusCode)
	w.Write(body) // the client may be gone
}

// rangeStart is where the range that a request asks for begins.
func rangeStart(r *http.Request) int64 {
	from, _, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("Range"), "bytes="), "-")
	start, err := strconv.ParseInt(from, 10, 64)
	if err != nil {
		return 0
	}
	return start
}

// TestNydusdRefusesFlippedBytes turns one bit in each part of the virtual blob
// as it is served. A read gives the right bytes or an error; and where the bit
// is in a chunk, every file that has the chunk gives EIO, and the others are
// read right.
func TestNydusdRefusesFlippedBytes(t *testing.T) {
	cv := byName(t, "duplicates")
	blob := cv.image.Blob
	meta, digests := blob.DataSize(), blob.DataSize()+int64(len(blob.Chunks))*24+4096
	for _, tc := range []struct {
		name string
		at   int64
		bad  int // the chunk that must be refused; -1: none in particular
	}{
		{"first byte of the first chunk", 0, 0},
		{"within the second chunk", blob.Chunks[1].Off + 100_000, 1},
		{"last byte of the last chunk", meta - 1, len(blob.Chunks) - 1},
		{"length of a chunk in the chunk-meta table", meta + 24 + 5, -1},
		{"offset of a chunk in the chunk-meta table", meta + 24 + 8 + 1, -1},
		{"flags of a chunk in the chunk-meta table", meta + 24 + 7, -1},
		{"header of the chunk-meta table", digests - 4096 + 12, -1},
		{"a digest in blob.digest", digests + 32 + 7, -1},
		{"table of contents", digests + int64(len(blob.Chunks))*32 + 30, -1},
		{"tar header behind it", blob.Size() - 500, -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel() // nydusd waits for seconds before it gives up
			proxy := &faulty{flip: tc.at}
			server := httptest.NewServer(proxy)
			defer server.Close()
			d := mountNydusd(t, cv, server.URL)
			r, err := readAll(cv, d.mnt, tc.bad)
			if err != nil {
				t.Error(err)
			}
			t.Logf("%d files read right, %d refused", r.right, r.refused)
			if proxy.hits.Load() == 0 {
				t.Error("the byte was never asked for, so nothing is shown")
			}
		})
	}
}

// TestFlippedBytesAreSeen is the counter-check: without cache.validate nydusd
// hands out the flipped byte, so it is its digest check that refuses it, and the
// comparison here does see it.
func TestFlippedBytesAreSeen(t *testing.T) {
	cv := byName(t, "duplicates")
	server := httptest.NewServer(&faulty{flip: 0})
	defer server.Close()
	d, err := startNydusd(t, cv, writeConfig(t, server.URL, false))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(cv, d.mnt, -1); !errors.Is(err, errWrong) {
		t.Errorf("reading all without validation gives %v, want wrong bytes", err)
	}
}

// TestNydusdGetsNothing has the server fail: reads give EIO, and the right bytes
// once it is there again.
func TestNydusdGetsNothing(t *testing.T) {
	cv := byName(t, "borders")
	proxy := &faulty{flip: -1}
	server := httptest.NewServer(proxy)
	defer server.Close()
	d := mountNydusd(t, cv, server.URL)
	small := filepath.Join(d.mnt, "size1")
	if _, err := os.ReadFile(small); err != nil { // from here on it has the chunk-meta table
		t.Fatal(err)
	}
	proxy.broken.Store(true)
	large := filepath.Join(d.mnt, fmt.Sprint("size", 9*chunk.DefaultSize-1))
	if _, err := os.ReadFile(large); !errors.Is(err, syscall.EIO) {
		t.Errorf("reading while the server answers 503 gives %v, want EIO", err)
	}
	proxy.broken.Store(false)
	if r, err := readAll(cv, d.mnt, -1); r.refused != 0 || err != nil {
		t.Errorf("%d files are refused although the server is there again; %v", r.refused, err)
	}
}

func byName(t *testing.T, name string) *converted {
	t.Helper()
	for _, cv := range images(t) {
		if cv.name == name {
			return cv
		}
	}
	t.Fatalf("no image %q", name)
	return nil
}

// reads counts the files of a mount by what reading them gave.
type reads struct{ right, refused int }

// readAll reads every file of a mount. Wrong bytes are an error, and so are
// other files refused than those that have the chunk bad; -1: any may be.
func readAll(cv *converted, mnt string, bad int) (reads, error) {
	var r reads
	err := cv.image.Tree.Walk(func(path string, n *rafs.Inode) error {
		if !n.IsRegular() {
			return nil
		}
		err := readChunks(mnt+path, n, int64(cv.image.Tree.ChunkSize))
		switch hasBad := bad >= 0 && slices.Contains(n.Chunks, cv.image.Blob.Chunks[bad].Digest); {
		case errors.Is(err, errWrong):
			return err
		case err == nil && hasBad:
			return fmt.Errorf("%s has the chunk with the flipped bit, and was read", path)
		case err == nil:
			r.right++
		case bad >= 0 && !(hasBad && errors.Is(err, syscall.EIO)):
			return err
		default:
			r.refused++
		}
		return nil
	})
	return r, err
}

var errWrong = errors.New("read without an error, and wrong")

// readChunks reads a file chunk by chunk and compares the digests.
func readChunks(path string, n *rafs.Inode, chunkSize int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, chunkSize)
	for k, d := range n.Chunks {
		p := buf[:chunk.Len(int64(k), n.Size, chunkSize)]
		if _, err := f.ReadAt(p, int64(k)*chunkSize); err != nil {
			return err
		}
		if chunk.Sum(p) != d {
			return fmt.Errorf("chunk %d of %s: %w", k, path, errWrong)
		}
	}
	return nil
}
