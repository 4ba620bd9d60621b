package reader

import (
	"context"
	"sync"
	"time"

	"quarry/store/chunk"
	"quarry/store/trace"
	"quarry/worker/folder"
)

const (
	// recordFor is how long after its first touch a run is recorded: what is touched
	// later is not what its start waits for, which is a second or two, and a minute
	// for a large test suite.
	recordFor = 60 * time.Second
	// recordBytes ends a recording when the touched chunks have more plain bytes: a
	// list has no more.
	recordBytes = trace.MaxPlain
	// recordLate is how old the first touch may be when somebody asks for the
	// recording: a run asks while its image is being mounted, and a touch that is older
	// is of a run before it.
	recordLate = 5 * time.Second
	// sendTimeout bounds the sending of one record, and what the end of a reader waits
	// for it.
	sendTimeout = 5 * time.Second
)

// recording is which chunks reads touched since an image was opened, in the order
// of the first touch. It goes to the store when a run has asked for that, and none
// has forbidden it. Safe for concurrent use.
type recording struct {
	record trace.Record // of which image
	length func(i int) int64
	stop   func() // called in a goroutine of its own when the time is over

	mu      sync.Mutex // guards what follows
	numbers []uint32
	left    int64 // of recordBytes
	began   time.Time
	timer   *time.Timer
	wanted  bool
	ended   bool // nothing more is noted
}

func newRecording(im *folder.Image, stop func()) *recording {
	rec := &recording{
		record: trace.Record{Image: im.ID, Source: im.Statement.Source, Platform: im.Statement.Platform},
		stop:   stop, left: recordBytes,
	}
	rec.length = func(i int) int64 { return int64(im.RAFS.Blob.Chunks[i].Len) }
	return rec
}

// touch notes a chunk that is read for the first time; blockdev calls it.
func (rec *recording) touch(i int) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.ended {
		return
	}
	if rec.timer == nil {
		rec.began, rec.timer = time.Now(), time.AfterFunc(recordFor, rec.stop)
	}
	if rec.left -= rec.length(i); rec.left < 0 || len(rec.numbers) == trace.MaxNumbers {
		rec.ended = true // the timer, or the end of the image, sends what there is
		return
	}
	rec.numbers = append(rec.numbers, uint32(i))
}

// want asks that the recording is sent. It is too late when a run before has
// touched chunks: a record is of one that found nothing read.
func (rec *recording) want() {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.timer == nil || time.Since(rec.began) < recordLate {
		rec.wanted = true
	}
}

// discard forgets the recording for good.
func (rec *recording) discard() {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.numbers, rec.ended = nil, true
	if rec.timer != nil {
		rec.timer.Stop()
	}
}

// take ends the recording and returns it encoded, once; nil when it is empty, or
// was not asked for.
func (rec *recording) take() []byte {
	rec.mu.Lock()
	numbers := rec.numbers
	rec.numbers, rec.ended = nil, true
	if rec.timer != nil {
		rec.timer.Stop()
	}
	wanted := rec.wanted
	rec.mu.Unlock()
	if !wanted || len(numbers) == 0 {
		return nil
	}
	r := rec.record
	r.Numbers = numbers
	b, err := r.Encode()
	if err != nil {
		return nil // not of a decoded image, whose statement has a platform
	}
	return b
}

// recordEnded sends what was recorded of an open image, when its time is over.
func (r *reader) recordEnded(id chunk.Digest, im *openImage) {
	record := im.recording.take()
	if record == nil {
		return
	}
	r.mu.Lock()
	open := r.open[id] == im
	if open {
		im.users++ // until it is sent
	}
	r.mu.Unlock()
	if open && !r.background(func() { // ends with sendTimeout
		defer r.leave(id, im)
		r.send(id, im.src, record)
	}) {
		r.leave(id, im)
	}
}

// send sends a record. That it does not arrive costs nobody anything, so one line
// of a reader is enough.
func (r *reader) send(id chunk.Digest, src ChunkSource, record []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), sendTimeout)
	defer cancel()
	if err := src.SendTrace(ctx, id, record); err != nil {
		r.unsent.Do(func() {
			r.cfg.Log.WarnContext(ctx, "record of a run not sent; further ones are not told", "image_id", id, "err", err)
		})
	}
}
