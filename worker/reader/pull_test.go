package reader_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/nbd"
	"quarry/store"
	"quarry/store/cache"
	"quarry/store/chunk"
	"quarry/worker/reader"
)

// files of these tests: some 300 chunks of 4 KiB.
const files = 200

func TestAPullBringsAllInAndASecondOneFetchesNothing(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/task:v1", files)
	all := reader.Count{Chunks: int64(len(img.Blob.Chunks)), Bytes: img.Blob.DataSize()}
	res := r.pull(t, id, false)
	if res.All != all || res.Fetched != all || res.Kept != all || res.FailedChunks() != 0 || res.Pinned {
		t.Errorf("first pull: %+v, want all %v fetched", res, all)
	}
	// What is cached survives the reader, and needs no store.
	r.restart(t, cache.MinLimit)
	r.stop()
	if res = r.pull(t, id, false); res.Cached != all || res.Fetched.Chunks != 0 || res.FailedChunks() != 0 {
		t.Errorf("second pull, without a store: %+v, want all %v cached", res, all)
	}
	c := r.open(t, id)
	p := make([]byte, c.Size())
	if err := readAt(t, c, p, 0); err != nil {
		t.Fatalf("read without a store: %v", err)
	}
	for _, k := range img.Blob.Chunks {
		if !bytes.Equal(p[img.Blob.MappedOff+k.DevOff:][:k.Len], img.Data[k.Off:][:k.Len]) {
			t.Fatalf("chunk %s has wrong bytes", k.Digest)
		}
	}
}

func TestAPullGoesOnWhereItWasAndMendsBadCopies(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/task:v1", files)
	bad := img.Blob.Chunks[len(img.Blob.Chunks)/2]
	r.Damage(t, bad.Digest)
	res := r.pull(t, id, false)
	if res.FailedChunks() != 1 || res.Failed[store.Corrupt] != 1 || res.Kept.Chunks != res.All.Chunks-1 {
		t.Fatalf("pull with one damaged chunk: %+v", res)
	}
	if e := res.Errors[0]; e.Chunk != bad.Digest || !strings.HasPrefix(e.Path, "/file") || e.Outcome != store.Corrupt {
		t.Errorf("failed chunk %+v, want %s", e, bad.Digest)
	}
	if got := lines(r.log.String(), "chunk cannot be pulled", id.String(), bad.Digest.String(), res.Errors[0].Path, `"corrupt"`); len(got) != 1 {
		t.Errorf("%d lines of the log tell of it, want 1:\n%s", len(got), r.log.String())
	}
	r.PutChunk(t, img.Data[bad.Off:][:bad.Len])
	if res = r.pull(t, id, false); res.Fetched.Chunks != 1 || res.Kept != res.All {
		t.Errorf("pull after the store was mended: %+v, want 1 fetched", res)
	}
	// A bit of the cache's folder.
	r.end()
	segments, err := filepath.Glob(filepath.Join(r.dir.Cache(), "*.chunks"))
	if err != nil || len(segments) == 0 {
		t.Fatalf("segments %v, error %v", segments, err)
	}
	flip(t, segments[0], 100)
	r.start(t, cache.MinLimit)
	defer r.open(t, id).Close() // so that the image stays open
	if res = r.pull(t, id, false); res.Fetched.Chunks != 1 || res.Kept != res.All {
		t.Errorf("pull after a bit of the cache was flipped: %+v, want 1 fetched", res)
	}
	if n := r.stats(t, id).DiskBad; n != 1 {
		t.Errorf("%d bad copies are counted, want 1", n)
	}
}

func flip(t *testing.T, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

func TestAPinStaysOverRestartsUntilItIsTakenBack(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "team/task:v1", files)
	if res := r.pull(t, id, true); !res.Pinned {
		t.Errorf("pull with a pin: %+v", res)
	}
	r.restart(t, cache.MinLimit)
	c, err := reader.DiskCache(t.Context(), r.dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Images) != 1 || c.Images[0].ID != id || c.Images[0].Cached != c.Images[0].All || c.Limit != cache.MinLimit {
		t.Errorf("the cache holds %+v, want all of %s pinned", c, id)
	}
	if res := r.pull(t, id, false); !res.Pinned {
		t.Error("a pull without a pin ends the pin there was, or does not tell of it")
	}
	if err := reader.Unpin(t.Context(), r.dir, id); err != nil {
		t.Fatal(err)
	}
	if c, err = reader.DiskCache(t.Context(), r.dir); err != nil || len(c.Images) != 0 || c.Pinned != 0 {
		t.Errorf("after the pin was taken back: %+v, error %v", c, err)
	}
}

func TestAPinThatIsTooLargeIsRefusedBeforeAnythingIsFetched(t *testing.T) {
	r := newRig(t)
	// Some 14 MiB: of a cache of 32 MiB less than half can be pinned.
	_, id := r.fetch(t, "team/large:v1", 2600)
	_, err := reader.Pull(t.Context(), r.dir, id, true, func(reader.PullProgress) {})
	if err == nil || !strings.Contains(err.Error(), "unpin another image or choose a larger --cache-size") {
		t.Fatalf("pin: %v, want a limit", err)
	}
	c, err := reader.DiskCache(t.Context(), r.dir)
	if err != nil || c.Chunks != 0 || len(c.Images) != 0 {
		t.Errorf("after the refusal the cache holds %+v, error %v", c, err)
	}
	if res := r.pull(t, id, false); res.Kept != res.All {
		t.Errorf("pull without a pin: %+v", res)
	}
}

// TestAPullThatFailsIsNotDone: what failed is no progress, and the log tells of a
// bounded number of chunks.
func TestAPullThatFailsIsNotDone(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "team/task:v1", files)
	r.stop()
	var last reader.PullProgress
	res, err := reader.Pull(t.Context(), r.dir, id, false, func(p reader.PullProgress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	if n := res.FailedChunks(); n != res.All.Chunks || n < 200 || len(res.Errors) != 64 {
		t.Fatalf("pull without a store: %d of %d chunks failed, %d of them named", n, res.All.Chunks, len(res.Errors))
	}
	if last.Done.Chunks != 0 || last.Failed != res.All.Chunks {
		t.Errorf("the progress at the end is %+v, want nothing done", last)
	}
	if n := len(lines(r.log.String(), "chunk cannot be pulled")); n != 64 {
		t.Errorf("%d lines of the log tell of chunks, want 64", n)
	}
	if got := lines(r.log.String(), "more chunks cannot be pulled", fmt.Sprintf(`"chunks":%d`, res.All.Chunks-64)); len(got) != 1 {
		t.Errorf("%d lines tell of the others:\n%s", len(got), r.log.String())
	}
}

// TestAPullDoesNotEvictItself pulls an image that fits into a cache that is full
// of another one, which was read and is read on.
func TestAPullDoesNotEvictItself(t *testing.T) {
	r := newRig(t)
	_, used := r.fetch(t, "team/used:v1", 2900) // some 22 MB in pages each, of 33
	_, fresh := r.fetch(t, "team/fresh:v1", 2901)
	r.pull(t, used, false)
	c := r.open(t, used)
	if err := readAll(t, c); err != nil {
		t.Fatal(err)
	}
	res := r.pull(t, fresh, false)
	if res.Kept != res.All || res.Limit != cache.MinLimit || res.OthersPinned != 0 {
		t.Errorf("pull: %+v, want all of it kept", res)
	}
	if res = r.pull(t, fresh, false); res.Cached != res.All {
		t.Errorf("second pull: %+v, want all of it cached", res)
	}
}

// readAll reads a whole device.
func readAll(t *testing.T, c *nbd.Client) error {
	t.Helper()
	p := make([]byte, 1<<20)
	for off := int64(0); off < c.Size(); off += int64(len(p)) {
		p = p[:min(int64(len(p)), c.Size()-off)]
		if err := readAt(t, c, p, off); err != nil {
			return err
		}
	}
	return nil
}

// TestAPinOutlivesALowerLimit: what is pinned beyond it is told of, and not lost.
func TestAPinOutlivesALowerLimit(t *testing.T) {
	r := newRig(t)
	r.restart(t, 2*cache.MinLimit)
	_, id := r.fetch(t, "team/large:v1", 3000)
	if res := r.pull(t, id, true); !res.Pinned || res.Kept != res.All {
		t.Fatalf("pull: %+v", res)
	}
	r.restart(t, cache.MinLimit)
	c, err := reader.DiskCache(t.Context(), r.dir)
	if err != nil || len(c.Images) != 1 || c.Images[0].ID != id || c.Pinned <= c.MaxPinned {
		t.Fatalf("with a lower limit: %+v, error %v; want the pin", c, err)
	}
	r.restart(t, 2*cache.MinLimit)
	if res := r.pull(t, id, false); !res.Pinned || res.Kept != res.All {
		t.Errorf("with the limit as before: %+v", res)
	}
}

func TestAReaderWithoutADiskCacheSaysWhy(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "team/task:v1", files)
	for what, tc := range map[string]struct {
		limit int64
		why   string
	}{
		"switched off":  {-1, "switched off"},
		"no folder":     {0, "not a directory"},
		"a small limit": {1, "limit of 1 bytes"},
	} {
		r.end()
		os.RemoveAll(r.dir.Cache())
		if what == "no folder" {
			if err := os.WriteFile(r.dir.Cache(), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		r.start(t, tc.limit)
		c, err := reader.DiskCache(t.Context(), r.dir)
		if err != nil || !strings.Contains(c.Missing, tc.why) {
			t.Errorf("%s: %+v, error %v, want %q", what, c, err, tc.why)
		}
		if _, err := reader.Pull(t.Context(), r.dir, id, false, func(reader.PullProgress) {}); err == nil || !strings.Contains(err.Error(), tc.why) {
			t.Errorf("%s: pull: %v", what, err)
		}
		if got := lines(r.metrics(t), "quarry_reader_disk_open 0"); len(got) != 1 {
			t.Errorf("%s: no metric tells of it", what)
		}
		conn := r.open(t, id)
		p := make([]byte, 64<<10)
		if err := readAt(t, conn, p, conn.Size()-int64(len(p))); err != nil {
			t.Errorf("%s: read: %v", what, err)
		}
		conn.Close()
	}
}

func TestAPullOfAnImageThatIsNotHereIsRefused(t *testing.T) {
	r := newRig(t)
	id := chunk.Sum([]byte("no such image"))
	if _, err := reader.Pull(t.Context(), r.dir, id, false, func(reader.PullProgress) {}); err == nil {
		t.Error("pulled what is not there")
	}
	if _, err := reader.ImageStats(t.Context(), r.dir, id); !errors.Is(err, reader.ErrNotOpen) {
		t.Errorf("stats: %v, want not open", err)
	}
}
