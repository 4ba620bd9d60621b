package reader_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker/reader"
)

// readChunk reads one chunk of an image through NBD.
func (r *rig) readChunk(t *testing.T, id chunk.Digest, b *rafs.Blob, c rafs.Chunk) error {
	t.Helper()
	conn := r.open(t, id)
	defer conn.Close()
	return readAt(t, conn, make([]byte, c.Len), b.MappedOff+c.DevOff)
}

func TestAFailedReadIsSeenInStatsMetricsAndLog(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/task:v1", files)
	keep := r.open(t, id) // so that the image stays open
	bad, last := img.Blob.Chunks[10], img.Blob.Chunks[len(img.Blob.Chunks)-1]
	r.Damage(t, bad.Digest)
	before, err := reader.ImageStats(t.Context(), r.dir, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.readChunk(t, id, img.Blob, bad); err == nil {
		t.Fatal("a damaged chunk was read")
	}
	st, err := reader.ImageStats(t.Context(), r.dir, id)
	if err != nil {
		t.Fatal(err)
	}
	d := st.Since(before, time.Time{})
	tiers := int64(0)
	for _, k := range d.Tiers {
		tiers += k.ReadBytes
	}
	if d.DeviceBytes != int64(bad.Len) || d.OwnBytes != 0 || tiers != 0 {
		t.Errorf("a failed read of %d bytes: %d of the device, %d of the bootstrap, %d of tiers", bad.Len, d.DeviceBytes, d.OwnBytes, tiers)
	}
	if d.FailedReads != 1 || d.Failed[store.Corrupt] != 1 || len(d.Errors) != 1 {
		t.Fatalf("one read failed, stats say %+v", d)
	}
	e := d.Errors[0]
	if e.Chunk != bad.Digest || e.Outcome != store.Corrupt || !strings.HasPrefix(e.Path, "/file") {
		t.Errorf("failed read %+v, want of %s", e, bad.Digest)
	}
	if got := lines(r.log.String(), "chunk cannot be read", id.String(), bad.Digest.String(), e.Path, `"corrupt"`); len(got) != 1 {
		t.Errorf("%d lines of the log tell of it, want 1:\n%s", len(got), r.log.String())
	}
	metric := func(image, outcome string, n int) string {
		return fmt.Sprintf("quarry_reader_failed_reads_total{image=%q,outcome=%q} %d\n", image, outcome, n)
	}
	if text := r.metrics(t); !strings.Contains(text, metric(id.Hex(), "corrupt", 1)) {
		t.Errorf("no metric tells of it:\n%s", text)
	}
	r.stop()
	if err := r.readChunk(t, id, img.Blob, last); err == nil {
		t.Fatal("a chunk was read without a store")
	}
	text := r.metrics(t)
	if !strings.Contains(text, metric(id.Hex(), "unreachable", 1)) || !strings.Contains(text, metric("closed", "corrupt", 0)) {
		t.Errorf("no metric tells of the store that is gone:\n%s", text)
	}
	// What an image counted stays in the sum when it is closed.
	keep.Close()
	waitFor(t, "the image to be closed", func() bool {
		text = r.metrics(t)
		return !strings.Contains(text, id.Hex())
	})
	if !strings.Contains(text, metric("closed", "corrupt", 1)) || !strings.Contains(text, "quarry_reader_open_images 0\n") {
		t.Errorf("after the image was closed:\n%s", text)
	}
}

func TestEachTierIsCounted(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/task:v1", files)
	keep := r.open(t, id)
	c := img.Blob.Chunks[20]
	if err := r.readChunk(t, id, img.Blob, c); err != nil {
		t.Fatal(err)
	}
	st := r.stats(t, id)
	if k := st.tier(reader.TierStore); k.Reads != 1 || k.ReadBytes != int64(c.Len) || k.Fetched.Chunks < 1 {
		t.Errorf("a cold read: %+v of the store", k)
	}
	if st.Requests == 0 || st.WireBytes == 0 || st.ChunkBytes < int64(c.Len) {
		t.Errorf("a cold read cost %+v", st)
	}
	if len(st.Slowest) == 0 || st.Slowest[0].Tier != reader.TierStore || st.Slowest[0].Chunk != c.Digest || st.Slowest[0].Path == "" {
		t.Errorf("slowest reads %+v", st.Slowest)
	}
	r.pull(t, id, false)
	keep.Close()
	r.restart(t, 0)
	r.open(t, id)
	if err := r.readChunk(t, id, img.Blob, c); err != nil {
		t.Fatal(err)
	}
	if k := r.stats(t, id).tier(reader.TierDisk); k.Reads != 1 || k.ReadBytes != int64(c.Len) {
		t.Errorf("a read of a cached chunk: %+v of the disk", k)
	}
}

func TestSinceIsWhatCameAfter(t *testing.T) {
	at := time.Unix(1e9, 0)
	failed := func(n int) (list []reader.ReadError) {
		for i := range n {
			list = append(list, reader.ReadError{Path: fmt.Sprint(i)})
		}
		return list
	}
	before := reader.Stats{
		Opening: "1-1", Requests: 3, WireBytes: 30, BucketBytes: 2, ChunkBytes: 9, DeviceBytes: 8,
		Tiers:  []reader.Tier{{Tier: reader.TierStore, Reads: 1, ReadBytes: 2, Fetched: reader.Count{Chunks: 3, Bytes: 4}}},
		Failed: map[store.Outcome]int64{store.Missing: 2, store.Corrupt: 1}, FailedReads: 3, Errors: failed(3),
		Prefetch: reader.Prefetch{Used: reader.Count{Chunks: 1}},
		Hedged:   reader.Hedged{Asked: reader.Count{Chunks: 1, Bytes: 2}, Twice: reader.Count{Chunks: 1, Bytes: 1}, Requests: 1, Won: 2, Again: 3},
	}
	after := reader.Stats{
		Opening: "1-1", Requests: 5, WireBytes: 70, BucketBytes: 3, ChunkBytes: 10, DeviceBytes: 18,
		Tiers:  []reader.Tier{{Tier: reader.TierStore, Reads: 5, ReadBytes: 5, Fetched: reader.Count{Chunks: 5, Bytes: 5}}},
		Failed: map[store.Outcome]int64{store.Missing: 3, store.Corrupt: 1}, FailedReads: 4, Errors: failed(4),
		Prefetch: reader.Prefetch{Used: reader.Count{Chunks: 4}},
		Hedged:   reader.Hedged{Asked: reader.Count{Chunks: 4, Bytes: 9}, Twice: reader.Count{Chunks: 3, Bytes: 9}, Requests: 5, Won: 7, Again: 9},
		Slowest:  []reader.SlowRead{{Path: "old", When: at.Add(-time.Second)}, {Path: "new", When: at.Add(time.Second)}},
	}
	want := reader.Stats{
		Opening: "1-1", Requests: 2, WireBytes: 40, BucketBytes: 1, ChunkBytes: 1, DeviceBytes: 10,
		Tiers:  []reader.Tier{{Tier: reader.TierStore, Reads: 4, ReadBytes: 3, Fetched: reader.Count{Chunks: 2, Bytes: 1}}},
		Failed: map[store.Outcome]int64{store.Missing: 1}, FailedReads: 1, Errors: failed(4)[3:],
		Prefetch: reader.Prefetch{Used: reader.Count{Chunks: 3}},
		Hedged:   reader.Hedged{Asked: reader.Count{Chunks: 3, Bytes: 7}, Twice: reader.Count{Chunks: 2, Bytes: 8}, Requests: 4, Won: 5, Again: 6},
		Slowest:  []reader.SlowRead{{Path: "new", When: at.Add(time.Second)}},
	}
	if d := cmp.Diff(want, after.Since(before, at)); d != "" {
		t.Error(d)
	}
}
