package reader_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/internal/need"
	"quarry/nbd"
	"quarry/signer"
	"quarry/store/bucket/buckettest"
	"quarry/store/cache"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
	"quarry/store/trace"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// touch reads the first bytes of chunks, which must be right.
func touch(t *testing.T, c *nbd.Client, img *apitest.Image, numbers ...uint32) {
	t.Helper()
	for _, n := range numbers {
		k := img.Blob.Chunks[n]
		p := make([]byte, k.Len)
		if err := readAt(t, c, p, img.Blob.MappedOff+k.DevOff); err != nil {
			t.Fatalf("chunk %d: %v", n, err)
		}
		if chunk.Sum(p) != k.Digest {
			t.Fatalf("chunk %d has wrong bytes", n)
		}
	}
}

// records returns the records in the bucket.
func (r *rig) records(t *testing.T) []string {
	t.Helper()
	return buckettest.Keys(t, r.Bucket, trace.Prefix)
}

// startFetch fetches an image with the rest of the answer.
func (r *rig) startFetch(t *testing.T, ref image.Ref) (*folder.Image, io.ReadCloser) {
	t.Helper()
	c, err := client.New(client.Config{URL: r.store})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	images := &folder.Images{Dir: r.dir, Source: c, Origin: folder.Origin{Stores: []string{r.store}}, Trust: signer.NewTrust(r.Key.Public())}
	var rest io.ReadCloser
	im, err := images.FetchStart(t.Context(), ref, image.HostPlatform(), true, func(_ chunk.Digest, r io.ReadCloser) { rest = r })
	if err != nil {
		t.Fatal(err)
	}
	if rest != nil {
		t.Cleanup(func() { rest.Close() })
	}
	return im, rest
}

func (r *rig) begin(t *testing.T, id chunk.Digest, rest io.Reader) {
	t.Helper()
	if err := reader.Start(t.Context(), r.dir, id, rest, nil); err != nil {
		t.Fatal(err)
	}
}

// run is one run on a fresh mount, recorded and sent: the reader ends, which waits
// for what is sent, and another one starts.
func (r *rig) run(t *testing.T, img *apitest.Image, id chunk.Digest, numbers ...uint32) {
	t.Helper()
	c := r.open(t, id)
	r.begin(t, id, nil)
	touch(t, c, img, numbers...)
	c.Close()
	r.restart(t, cache.MinLimit)
}

// freshWorker is a rig of the same store with another worker folder.
func (r *rig) freshWorker(t *testing.T) *rig {
	t.Helper()
	other := &rig{World: r.World, log: &logBuffer{}, store: r.store, stop: r.stop}
	var err error
	if other.dir, err = folder.Open(filepath.Join(need.ShortDir(t), "w")); err != nil {
		t.Fatal(err)
	}
	other.start(t, cache.MinLimit)
	t.Cleanup(func() { other.end() })
	return other
}

// prefetched waits until n chunks were fetched before a read asked: the prefetch
// tells nobody that it has ended.
func (r *rig) prefetched(t *testing.T, id chunk.Digest, n int) (st tiered) {
	t.Helper()
	waitFor(t, "prefetched chunks", func() bool {
		st = r.stats(t, id)
		return st.Prefetch.Fetched.Chunks == int64(n)
	})
	return st
}

// write writes a part of a stream, which its reader may have given up.
func write(t *testing.T, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, io.ErrClosedPipe) {
		t.Fatal(err)
	}
}

func TestRunsBecomeAListThatSavesAColdWorkerItsRequests(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	var touched []uint32
	for n := uint32(0); int(n) < len(img.Blob.Chunks); n += 2 {
		touched = append(touched, n)
	}
	for i := range 2 {
		r.run(t, img, id, touched...)
		if got := r.records(t); len(got) != i+1 {
			t.Fatalf("%d records after run %d", len(got), i+1)
		}
	}
	raw := buckettest.Bytes(t, r.Bucket, r.records(t)[0])
	if rec, err := trace.Decode(raw); err != nil || rec.Image != id || !slices.Equal(rec.Numbers, touched) {
		t.Fatalf("record %+v, %v, want %v", rec, err, touched)
	}
	// A cold worker of the image, and one of a sibling that never ran.
	sibling := r.Publish(t, "team/b:1", 60, 60)
	for _, target := range []*apitest.Image{img, sibling} {
		t.Run(target.Ref.String(), func(t *testing.T) {
			cold := r.freshWorker(t)
			im, rest := cold.startFetch(t, target.Ref)
			c := cold.open(t, im.ID)
			cold.begin(t, im.ID, rest)
			before := cold.prefetched(t, im.ID, len(touched))
			touch(t, c, target, touched...)
			st := cold.stats(t, im.ID)
			// A stream that was held up for long is given up, and one request brings the rest.
			if n := before.tier(reader.TierStart).Fetched.Chunks; n == 0 || before.Requests > 1 {
				t.Errorf("%d chunks came with the start, the rest in %d requests", n, before.Requests)
			}
			if st.Requests != before.Requests || st.Prefetch.Used.Chunks != int64(len(touched)) {
				t.Errorf("reads made %d requests, prefetch %+v, want all %d used", st.Requests-before.Requests, st.Prefetch, len(touched))
			}
		})
	}
}

func TestWhatTheStreamDoesNotBringIsFetchedBehindIt(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	all := make([]uint32, len(img.Blob.Chunks))
	for i := range all {
		all[i] = uint32(i)
	}
	var b bytes.Buffer
	w := trace.NewWriter(&b)
	if err := errors.Join(w.List(all, 0), w.Close()); err != nil {
		t.Fatal(err)
	}
	c := r.open(t, id)
	r.begin(t, id, &b)
	before := r.prefetched(t, id, len(all)).Requests
	r.stop() // from here on the store is gone
	touch(t, c, img, all...)
	if after := r.stats(t, id).Requests; after != before || before > 10 {
		t.Errorf("%d requests by the prefetch and %d by reads", before, after-before)
	}
}

// A sibling of what the worker has run: the store cannot know that its chunks are
// here, and would go on sending them.
func TestAStreamOfWhatTheDiskHasIsNotTaken(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	all := make([]uint32, len(img.Blob.Chunks))
	for i := range all {
		all[i] = uint32(i)
	}
	r.pull(t, id, false)
	sibling := r.Publish(t, "team/b:1", 60, 60)
	im, _ := r.startFetch(t, sibling.Ref)
	c := r.open(t, im.ID)
	pr, pw := io.Pipe()
	defer pw.Close() // a stream that goes on until nobody takes it
	ended := make(chan error, 1)
	go func() { ended <- reader.Start(t.Context(), r.dir, im.ID, pr, nil) }() // ends when the reader answers
	w := trace.NewWriter(pw)
	write(t, w.List(all, len(all)))
	write(t, w.Chunk(chunkOf(sibling, 0)))
	if err := <-ended; err != nil {
		t.Errorf("start: %v", err)
	}
	touch(t, c, sibling, all...)
	st, err := reader.ImageStats(t.Context(), r.dir, im.ID)
	if err != nil || st.Prefetch.Fetched.Chunks != 0 || st.Requests != 0 {
		t.Errorf("prefetch %+v, %d requests, %v: all was on the disk", st.Prefetch, st.Requests, err)
	}
}

// chunkOf is a chunk of an image as a stream carries it.
func chunkOf(img *apitest.Image, n uint32) trace.Chunk {
	c := img.Blob.Chunks[n]
	codec, stored := pack.Compress(nil, img.Data[c.Off:c.Off+int64(c.Len)])
	return trace.Chunk{Number: n, Codec: codec, Len: c.Len, Stored: stored}
}

func TestAStreamThatStallsHoldsUpNoRead(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	pr, pw := io.Pipe()
	defer pw.Close() // it stays open until the reads are done
	ended := make(chan error, 1)
	go func() { ended <- reader.Start(t.Context(), r.dir, id, pr, nil) }() // ends with the pipe
	w := trace.NewWriter(pw)
	write(t, w.List([]uint32{0, 1, 2, 3, 4}, 5))
	write(t, w.Chunk(chunkOf(img, 0)))
	touch(t, r.open(t, id), img, 0, 1, 2, 3, 4, 9)
	if err := <-ended; err != nil { // the reader gives the stream up by itself
		t.Errorf("start: %v", err)
	}
}

func TestAStartTellsWhichChunksCame(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	wrong := chunkOf(img, 2)
	wrong.Stored = bytes.Repeat([]byte("x"), len(wrong.Stored))
	pr, pw := io.Pipe()
	defer pw.Close()
	var came []uint32
	ended := make(chan error, 1)
	go func() { // ends with the pipe
		ended <- reader.Start(t.Context(), r.dir, id, pr, func(n uint32) { came = append(came, n) })
	}()
	w := trace.NewWriter(pw)
	write(t, w.List([]uint32{4, 2, 0, 1, 3}, 4))
	for _, c := range []trace.Chunk{chunkOf(img, 4), wrong, chunkOf(img, 0)} { // 1 is left out
		write(t, w.Chunk(c))
	}
	write(t, w.Close())
	pw.Close()
	if err := <-ended; err != nil || !slices.Equal(came, []uint32{4, 0, 2, 1, 3}) {
		t.Errorf("told of %v, %v, want chunks 4 and 0, and then what was fetched behind them", came, err)
	}
}

// What the stream does not bring is told as well once it is here, from wherever.
func TestAStartThatReadsAheadIsToldOfItsWholeList(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	all := make([]uint32, len(img.Blob.Chunks))
	for i := range all {
		all[i] = uint32(i)
	}
	var stream bytes.Buffer
	w := trace.NewWriter(&stream)
	if err := errors.Join(w.List(all, 2), w.Chunk(chunkOf(img, 0)), w.Chunk(chunkOf(img, 1)), w.Close()); err != nil {
		t.Fatal(err)
	}
	c := r.open(t, id)
	defer c.Close()
	told := func() (numbers []uint32) {
		t.Helper()
		if err := reader.Start(t.Context(), r.dir, id, bytes.NewReader(stream.Bytes()), func(n uint32) { numbers = append(numbers, n) }); err != nil {
			t.Fatal(err)
		}
		return numbers
	}
	if got := told(); !slices.Equal(got, all) {
		t.Errorf("told of %v, want all of %d chunks", got, len(all))
	}
	r.stop() // what is here needs no store
	if got := told(); !slices.Equal(got, all) {
		t.Errorf("told of %v without a store, want all of %d chunks", got, len(all))
	}
	touch(t, c, img, all...)
}

func TestStreamsOfAHostileStoreChangeNoByte(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	count := uint32(len(img.Blob.Chunks))
	stream := func(list []uint32, coming int, chunks ...trace.Chunk) []byte {
		var b bytes.Buffer
		w := trace.NewWriter(&b)
		err := w.List(list, coming)
		for _, c := range chunks {
			err = errors.Join(err, w.Chunk(c))
		}
		if err := errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	swapped := chunkOf(img, 1)
	swapped.Number = 0
	broken := chunkOf(img, 0)
	broken.Codec, broken.Stored = pack.Zstd, bytes.Repeat([]byte("x"), int(broken.Len)/2)
	for name, c := range map[string]struct {
		stream []byte
		logged string
	}{
		"junk":                      {[]byte("<html>It works!</html>"), "refused"},
		"nothing":                   {[]byte{}, ""},
		"a number beyond the table": {stream([]uint32{0, count}, 0), "refused"},
		"a number far beyond":       {stream([]uint32{1<<32 - 1}, 1, trace.Chunk{Number: 1<<32 - 1, Len: 1, Stored: []byte("x")}), "refused"},
		"another chunk's bytes":     {stream([]uint32{0, 1}, 2, swapped, chunkOf(img, 1)), ""},
		"bytes that do not unpack":  {stream([]uint32{0, 1}, 2, broken, chunkOf(img, 1)), ""},
		"a stream that is cut off":  {stream([]uint32{0, 1}, 2, chunkOf(img, 0), chunkOf(img, 1))[:100], ""},
		"a byte behind the end":     {append(stream([]uint32{0}, 1, chunkOf(img, 0)), 0), "refused"},
		"a good one":                {stream([]uint32{0, 1}, 2, chunkOf(img, 0), chunkOf(img, 1)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := r.freshWorker(t)
			w.startFetch(t, img.Ref)
			w.begin(t, id, bytes.NewReader(c.stream))
			touch(t, w.open(t, id), img, 0, 1, 2, count-1)
			w.end()
			if refused := strings.Contains(w.log.String(), "prefetch stream is refused"); refused != (c.logged != "") {
				t.Errorf("logged %q", w.log)
			}
		})
	}
	if err := reader.Start(t.Context(), r.dir, chunk.Sum(nil), nil, nil); err == nil {
		t.Error("a start of an image that is not here went through")
	}
}

func TestOnlyWhatARunAskedForIsSentAndNothingOfOneThatForbids(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	mount := r.dir.MountDir(id)
	noTrace := func(t *testing.T) {
		if err := reader.NoTrace(t.Context(), r.dir, id); err != nil {
			t.Fatal(err)
		}
	}
	mark := func(dir string) func(*testing.T) {
		return func(t *testing.T) {
			if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(folder.NoTraceMark(dir), nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
		}
	}
	start := func(t *testing.T) { r.begin(t, id, nil) }
	ahead := func(t *testing.T) {
		if err := reader.Start(t.Context(), r.dir, id, nil, func(uint32) {}); err != nil {
			t.Fatal(err)
		}
	}
	noop := func(*testing.T) {}
	for _, c := range []struct {
		name          string
		before, after func(*testing.T) // the first touch
		sent          int
	}{
		{"nobody asked", noop, noop, 0},
		{"a run asked", start, noop, 1},
		{"a run asked a moment late", noop, start, 1},
		{"a run that reads ahead asked", ahead, noop, 0},
		{"a run that reads ahead came after", start, ahead, 0},
		{"a graded run came before", noTrace, start, 0},
		{"a graded run came after", start, noTrace, 0},
		{"a graded run uses the mount", mark(mount), start, 0},
		{"a graded run uses the other mount", mark(r.dir.NoACLDir(id)), start, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			had := len(r.records(t))
			conn := r.open(t, id)
			c.before(t)
			touch(t, conn, img, 3, 4)
			c.after(t)
			touch(t, conn, img, 5)
			conn.Close()
			r.restart(t, cache.MinLimit)
			if got := len(r.records(t)) - had; got != c.sent {
				t.Errorf("%d records were sent, want %d", got, c.sent)
			}
		})
	}
	noTrace(t) // of an image that is not open
}

func TestAStoreThatTakesNoRecordCostsOneLine(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "team/a:1", 60)
	other, otherID := r.fetch(t, "team/b:1", 61)
	conns := []*nbd.Client{r.open(t, id), r.open(t, otherID)}
	r.begin(t, id, nil)
	r.begin(t, otherID, nil)
	touch(t, conns[0], img, 3)
	touch(t, conns[1], other, 3)
	r.stop()
	for _, c := range conns {
		c.Close()
	}
	r.end()
	if got := lines(r.log.String(), "record of a run not sent"); len(got) != 1 {
		t.Errorf("%d lines, want one: %v", len(got), got)
	}
}
