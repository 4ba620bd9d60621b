package reader

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"

	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/store/chunk"
	"quarry/store/trace"
	"quarry/worker/folder"
)

const (
	// startStall ends a stream that brings no chunk for so long. Reads of what it is
	// expected to bring wait for a tenth of that, blockdev.DefaultHedge.
	startStall = time.Second
	// startTime ends a stream: 32 MiB of plain chunks, stored in 13 MiB, take 1.1 s at
	// 100 Mbit/s. What has not come by then is fetched like the rest of the list.
	startTime = 5 * time.Second
	// startHold is how long an image stays open for the mount that is about to come:
	// as long as a reader stays without one.
	startHold = 10 * time.Second
	// maxStarts bounds the streams taken at once, with what each holds beside the
	// chunks of the shared memory: 64 KiB of list and a stored chunk.
	maxStarts = 64
)

// serveStart answers POST /images/{id}/start: a run of the image begins, and wants
// to be recorded, unless it reads chunks before they are asked for, with ?ahead=true.
// The body, if any, is a trace stream: chunks of it go to the reads that need them,
// and the rest of its list is fetched behind them. The image is opened when it is
// not. The answer, of status 200 whatever is wrong with the stream, which was a hint,
// has the numbers of the chunks that came, as they come, and ends with the stream;
// with ?ahead=true those of the rest follow, as soon as they can be read without the
// store.
func (r *reader) serveStart(w http.ResponseWriter, q *http.Request) {
	id, err := chunk.ParseHex(q.PathValue("id"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.connState(1) // it keeps the reader, as a connection does
	defer r.connState(-1)
	used, err := r.openImage(q.Context(), id)
	if err != nil {
		status := http.StatusInternalServerError
		if errors.Is(err, nbd.ErrUnknownExport) {
			status = http.StatusNotFound
		}
		http.Error(w, err.Error(), status)
		return
	}
	if !r.background(func() { // ends with startHold
		defer used.Close()
		select {
		case <-used.mounted:
		case <-r.ended:
		case <-time.After(startHold):
		}
	}) {
		used.Close()
		http.Error(w, "the reader ends", http.StatusServiceUnavailable)
		return
	}
	// A recording that nobody asks for again is lost with its reader. So nothing that
	// a run has forbidden is recorded by the next reader, but for the mark of the mount.
	ahead := q.FormValue("ahead") == "true"
	if noTrace(r.cfg.Dir, id) || ahead {
		used.recording.discard()
	} else {
		used.recording.want()
	}
	if q.ContentLength == 0 {
		return
	}
	tell := newTeller(w)
	if rest := r.takeStart(q.Context(), tell, q.Body, used); ahead && rest != nil {
		r.tellRest(tell, used.openImage, rest)
	}
}

// takeStart takes a stream, and has what it does not bring fetched; rest gets the
// numbers of those chunks when they are, and is closed. It is nil when there are none.
func (r *reader) takeStart(ctx context.Context, tell *teller, body io.Reader, used *usedImage) (rest <-chan []uint32) {
	begun, ctl := time.Now(), tell.ctl
	defer ctl.SetReadDeadline(begun) // the answer waits for nothing that is not read
	select {
	case r.starts <- struct{}{}:
		defer func() { <-r.starts }()
	default:
		return nil
	}
	ctl.SetReadDeadline(begun.Add(startTime)) // the list may take its time
	tr := trace.NewReader(body)
	list, coming, err := tr.List()
	if err == nil {
		err = used.ofTable(list)
	}
	if err != nil || len(list) == 0 {
		r.hintRefused(ctx, used.id, err)
		return nil
	}
	var came map[uint32]bool
	if !r.onDisk(used.openImage, list[:coming]) {
		came, err = used.deliver(tr, list[:coming], tell.came, func() {
			ctl.SetReadDeadline(earlier(begun.Add(startTime), time.Now().Add(startStall)))
		})
		tell.flush()
		r.hintRefused(ctx, used.id, err)
	}
	return r.prefetch(used, slices.DeleteFunc(list, func(n uint32) bool { return came[n] }))
}

// prefetchTold is how many chunks are fetched before it is told that they are here:
// two requests of Prefetch.
const prefetchTold = 128

// prefetch has chunks fetched, and tells which were.
func (r *reader) prefetch(used *usedImage, list []uint32) <-chan []uint32 {
	id, im := used.id, used.openImage
	// Nobody need listen.
	fetched := make(chan []uint32, len(list)/prefetchTold+1)
	if !r.background(func() { // ends with the device
		defer close(fetched)
		for part := range slices.Chunk(list, prefetchTold) {
			if err := im.Prefetch(context.Background(), part); err != nil {
				if !errors.Is(err, blockdev.ErrClosed) {
					r.cfg.Log.Debug("prefetch ended", "image_id", id, "err", err)
				}
				return
			}
			fetched <- part
		}
	}) {
		close(fetched)
	}
	return fetched
}

// tellRest tells of the chunks that are fetched, as they are, those that are still
// here: what has no room any more would be asked of the store again. The request's
// context says nothing of who asked, since its body may not be read any more.
func (r *reader) tellRest(tell *teller, im *openImage, fetched <-chan []uint32) {
	for tell.err == nil {
		select {
		case part, more := <-fetched:
			if !more {
				return
			}
			for _, n := range part {
				if im.Has(n) {
					tell.came(n, int(im.chunks[n].Len))
				}
			}
			tell.flush()
		case <-r.ended:
			return
		}
	}
}

// onDisk reports whether most bytes of the chunks that are coming are in the disk
// cache: a store cannot know what a worker has of other images. The stream is worth
// less than its bytes then, and what the cache has not is fetched with the rest.
func (r *reader) onDisk(im *openImage, coming []uint32) bool {
	if r.disk.need() != nil {
		return false
	}
	var all, here int64
	for _, n := range coming {
		c := im.chunks[n]
		all += int64(c.Len)
		if r.disk.Has(c.Digest) {
			here += int64(c.Len)
		}
	}
	return here > all/2
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// ofTable refuses a list that is not of the image.
func (im *openImage) ofTable(list []uint32) error {
	for _, n := range list {
		if int64(n) >= int64(len(im.chunks)) {
			return fmt.Errorf("prefetch list has chunk %d of an image that has %d: %w", n, len(im.chunks), trace.ErrMalformed)
		}
	}
	return nil
}

// deliver brings the chunks of a stream to the device until it ends, and says which
// came. before is called before each is read, tell after each that came.
func (im *openImage) deliver(tr *trace.Reader, coming []uint32, tell func(n uint32, size int), before func()) (came map[uint32]bool, err error) {
	e := im.Expect(coming)
	defer e.End()
	came = make(map[uint32]bool, len(coming))
	for {
		before()
		c, err := tr.Next()
		if err == io.EOF {
			return came, nil
		}
		if err != nil {
			return came, err
		}
		// A chunk that is not what it should be spoils itself alone.
		p, err := c.Plain(nil) // which the device keeps
		if err != nil {
			continue
		}
		if e.Deliver(im.chunks[c.Number].Digest, p) == nil {
			came[c.Number] = true
			tell(c.Number, len(p))
		}
	}
}

// tellEvery is how many bytes of chunks come before it is told that they came: what
// is told wakes another process.
const tellEvery = 512 << 10

// teller tells who hands a stream over which of its chunks have come, by their
// numbers of 4 bytes each.
type teller struct {
	w    io.Writer
	ctl  *http.ResponseController
	buf  []byte
	size int
	err  error // who was told has gone
}

func newTeller(w http.ResponseWriter) *teller {
	t := &teller{w: w, ctl: http.NewResponseController(w)}
	t.ctl.EnableFullDuplex()
	return t
}

func (t *teller) came(n uint32, size int) {
	t.buf = binary.LittleEndian.AppendUint32(t.buf, n)
	if t.size += size; t.size >= tellEvery {
		t.flush()
	}
}

// flush tells what was not told yet. Who does not hear it has gone.
func (t *teller) flush() {
	_, err := t.w.Write(t.buf)
	t.err = errors.Join(err, t.ctl.Flush())
	t.buf, t.size = t.buf[:0], 0
}

// hintRefused logs what is wrong with a stream that is more than cut off: the store
// node lies.
func (r *reader) hintRefused(ctx context.Context, id chunk.Digest, err error) {
	switch {
	case err == nil:
	case errors.Is(err, trace.ErrMalformed), errors.Is(err, trace.ErrVersion):
		r.cfg.Log.WarnContext(ctx, "the store's prefetch stream is refused", "image_id", id, "err", err)
	default:
		r.cfg.Log.DebugContext(ctx, "the store's prefetch stream ended early", "image_id", id, "err", err)
	}
}

// serveNoTrace answers DELETE /images/{id}/trace: a run that must leave no trace
// uses the image, and what was recorded of it so far is forgotten. An image that is
// not open has no recording.
func (r *reader) serveNoTrace(w http.ResponseWriter, q *http.Request) {
	id, err := chunk.ParseHex(q.PathValue("id"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	im := r.open[id]
	r.mu.Unlock()
	if im != nil {
		if <-im.ready; im.recording != nil {
			im.recording.discard()
		}
	}
	w.WriteHeader(http.StatusNoContent)
}

// noTrace reports whether a mount of the image is marked. When that cannot be
// known, it is.
func noTrace(d folder.Dir, id chunk.Digest) bool {
	for _, dir := range []string{d.MountDir(id), d.NoACLDir(id)} {
		if _, err := os.Stat(folder.NoTraceMark(dir)); !errors.Is(err, fs.ErrNotExist) {
			return true
		}
	}
	return false
}

// Start tells the reader that a run of an image begins, and hands on the rest of
// the answer to /v1/start, if any. It returns when that has ended. came, if not
// nil, is told which chunks of its list the reader has got, by number, for the caller
// to read, and Start returns when there are no more: nothing is recorded of the image
// then, because nobody could tell what the run itself touches.
func Start(ctx context.Context, d folder.Dir, id chunk.Digest, rest io.Reader, came func(n uint32)) error {
	if rest == nil {
		rest = http.NoBody
	}
	ahead := strconv.FormatBool(came != nil)
	resp, err := call(ctx, d, 0, http.MethodPost, "/images/"+id.Hex()+"/start?ahead="+ahead, rest, http.StatusOK)
	if err != nil {
		return fmt.Errorf("start of image %s: %w", id, err)
	}
	defer resp.Body.Close()
	for b := bufio.NewReader(resp.Body); ; {
		var number [4]byte
		switch _, err := io.ReadFull(b, number[:]); {
		case err == io.EOF:
			return nil
		case err != nil:
			return fmt.Errorf("start of image %s: %w", id, err)
		case came != nil:
			came(binary.LittleEndian.Uint32(number[:]))
		}
	}
}

// NoTrace has the reader forget what it has recorded of an open image, and record
// nothing more of it while it is open.
func NoTrace(ctx context.Context, d folder.Dir, id chunk.Digest) error {
	if err := ask(ctx, d, http.MethodDelete, "/images/"+id.Hex()+"/trace"); err != nil {
		return fmt.Errorf("forget the trace of image %s: %w", id, err)
	}
	return nil
}
