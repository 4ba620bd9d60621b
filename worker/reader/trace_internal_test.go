package reader

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/trace"
	"quarry/worker/folder"
)

// anImage has n chunks of a length each; only the chunk table counts here.
func anImage(n int, length uint32) *folder.Image {
	blob := &rafs.Blob{Chunks: make([]rafs.Chunk, n)}
	for i := range blob.Chunks {
		blob.Chunks[i].Len = length
	}
	return &folder.Image{
		ID: chunk.Sum([]byte("image")), RAFS: &rafs.Image{Blob: blob},
		Statement: image.Statement{Source: chunk.Sum([]byte("source")), Platform: image.HostPlatform()},
	}
}

// taken is what a recording has at its end.
func taken(t *testing.T, rec *recording) []uint32 {
	t.Helper()
	b := rec.take()
	if again := rec.take(); again != nil {
		t.Error("a recording was taken twice")
	}
	if b == nil {
		return nil
	}
	r, err := trace.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return r.Numbers
}

func TestARecordingIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		chunks int
		length uint32
		want   int
	}{
		"by plain bytes": {300, 256 << 10, recordBytes / (256 << 10)},
		"by numbers":     {trace.MaxNumbers + 10, 1, trace.MaxNumbers},
		"not at all":     {300, 1, 300},
	} {
		rec := newRecording(anImage(c.chunks, c.length), func() {})
		rec.want()
		for i := range c.chunks {
			rec.touch(i)
		}
		got := taken(t, rec)
		if len(got) != c.want || got[0] != 0 || got[c.want-1] != uint32(c.want-1) {
			t.Errorf("%s: %d numbers, want the first %d", name, len(got), c.want)
		}
	}
}

func TestARecordingEndsWithItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []uint32
		ended := 0
		var rec *recording
		rec = newRecording(anImage(100, 1), func() {
			ended++
			got = taken(t, rec)
		})
		time.Sleep(time.Hour) // nobody has read anything yet
		rec.want()
		rec.touch(7)
		time.Sleep(recordFor - time.Millisecond)
		rec.touch(8)
		time.Sleep(time.Millisecond)
		synctest.Wait()
		rec.touch(9)
		rec.touch(10)
		if ended != 1 || !slices.Equal(got, []uint32{7, 8}) {
			t.Errorf("ended %d times with %v, want once with what was touched in time", ended, got)
		}
	})
}

func TestARunThatComesLaterIsNotRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := newRecording(anImage(100, 1), func() {})
		rec.touch(7)
		time.Sleep(recordLate)
		rec.want()
		rec.touch(8)
		if got := taken(t, rec); got != nil {
			t.Errorf("got %v of a run on a mount that was read before", got)
		}
		rec = newRecording(anImage(100, 1), func() {})
		rec.want()
		rec.touch(7)
		rec.discard()
		rec.want()
		rec.touch(8)
		if got := taken(t, rec); got != nil {
			t.Errorf("got %v after it was discarded", got)
		}
	})
}
