package packed

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
)

const (
	// lookupBatch is how many digests go to the index at once, which sorts them: enough
	// that neighbours share blocks, few enough to hold up nobody, 5 ms from its disk.
	lookupBatch = 1024
	// maxGap is read and thrown away rather than left out: 32 KiB cost a disk or
	// network less than a second request.
	maxGap = 32 << 10
	// maxRange bounds a merged read. A single chunk may be longer.
	maxRange = 1 << 20
	// readers bounds the ranges of one batch in flight, and with it memory: 8
	// times the larger of maxRange and a stored chunk.
	readers = 8
	// helpAfter is how long a read of the bucket may take before a batch reads other
	// ranges beside it. A range in the page cache takes less than half of that, and is
	// served best one after another, by one processor that has it in its cache.
	helpAfter = time.Millisecond
	// maxHelpers bounds the readers of all batches beyond the first of each, which
	// none has to wait for: 256 MiB of ranges. A batch that finds none left reads
	// its ranges one after another.
	maxHelpers = 256
)

// Stored is a chunk as it lies in a pack: the checksum of Bytes was verified,
// the digest was not.
type Stored struct {
	Codec pack.Codec
	Len   uint32 // of the plain bytes
	CRC   uint32 // pack.Checksum(Bytes)
	Bytes []byte
	// More says that a chunk of the same read follows at once, so that there is no
	// need to send this one by itself.
	More bool
}

// buffers holds scratch space for stored and plain bytes.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// grown returns b with length n; its content is undefined.
func grown(b []byte, n int) []byte { return slices.Grow(b[:0], n)[:n] }

// Get implements store.Getter. A copy whose bytes are wrong is condemned; one whose
// pack is missing is a *store.CorruptError as long as it is.
func (s *Store) Get(ctx context.Context, d chunk.Digest, dst []byte) ([]byte, error) {
	loc, err := s.locate(ctx, d)
	if err != nil {
		return nil, err
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for {
		*buf = grown(*buf, int(loc.Stored))
		if err = s.readStored(ctx, d, loc, *buf); err == nil {
			return s.plain(ctx, d, loc, *buf, dst)
		}
		now, found := s.movedTo(ctx, d, loc, err)
		if !found {
			return nil, err
		}
		loc = now
	}
}

// movedTo returns where a chunk is that could not be read at loc, when the index has
// it elsewhere by now: gc copies chunks and deletes the packs where they were.
func (s *Store) movedTo(ctx context.Context, d chunk.Digest, loc chunkindex.Location, err error) (chunkindex.Location, bool) {
	if err == nil || !isDamage(err) && !errors.As(err, new(*store.CorruptError)) {
		return loc, false
	}
	locs, found, err := s.lookupNow(ctx, []chunk.Digest{d})
	if err != nil || !found[0] || locs[0] == loc {
		return loc, false
	}
	return locs[0], true
}

func (s *Store) locate(ctx context.Context, d chunk.Digest) (chunkindex.Location, error) {
	locs, found, err := s.lookup(ctx, []chunk.Digest{d})
	if err != nil {
		return chunkindex.Location{}, err
	}
	if !found[0] {
		return chunkindex.Location{}, fmt.Errorf("%s: %w", d, store.ErrNotFound)
	}
	s.watch(ctx, d, locs[0].Pack)
	return locs[0], nil
}

// readStored fills p with the stored bytes of one chunk and checks them.
func (s *Store) readStored(ctx context.Context, d chunk.Digest, loc chunkindex.Location, p []byte) error {
	if _, err := s.readRange(ctx, loc.Pack, p, loc.Off); err != nil {
		return s.unread(ctx, d, loc, err)
	}
	fresh, err := s.checkStored(ctx, d, loc, p)
	copy(p, fresh)
	return err
}

// unread is the error of a chunk whose bytes could not be read. Nothing is condemned
// for it: a pack that is missing or cut off may be whole again, and then its chunks
// are good. Until then each read finds out anew, and a Write stores them anew.
func (s *Store) unread(ctx context.Context, d chunk.Digest, loc chunkindex.Location, err error) error {
	if !isDamage(err) {
		return fmt.Errorf("read chunk %s: %w", d, err)
	}
	s.metrics.damaged.Inc()
	if s.broken.add(loc.Pack) {
		s.log.WarnContext(ctx, "pack is missing or cut off", "pack", loc.Pack, "error", err)
	}
	return &store.CorruptError{Want: d, Key: pack.Key(loc.Pack), Off: loc.Off, Err: err}
}

// checkStored returns stored when its checksum is right, or the same bytes read anew
// when it was the range cache that had them wrong.
func (s *Store) checkStored(ctx context.Context, d chunk.Digest, loc chunkindex.Location, stored []byte) ([]byte, error) {
	s.metrics.readChunks.Inc()
	got := pack.Checksum(stored)
	if got == loc.CRC {
		return stored, nil
	}
	err := fmt.Errorf("stored bytes have checksum %08x, want %08x", got, loc.CRC)
	fresh, _, err := s.anew(ctx, loc, &store.CorruptError{Want: d, Err: err})
	return fresh, err
}

// plain decompresses stored bytes into dst[:0] and verifies the digest.
func (s *Store) plain(ctx context.Context, d chunk.Digest, loc chunkindex.Location, stored, dst []byte) ([]byte, error) {
	p, err := pack.Decode(dst, loc.Codec, stored, loc.Len)
	got := d
	if err == nil {
		got = chunk.Sum(p)
	}
	if err == nil && got == d {
		return p, nil
	}
	wrong := &store.CorruptError{Want: d, Err: err}
	if err == nil {
		wrong.Got = got
	}
	_, p, err = s.anew(ctx, loc, wrong)
	return p, err
}

// damaged completes the error of a damaged copy and condemns the copy, or keeps it in
// mind where the store is only read. The
// reader going away must not stop that.
func (s *Store) damaged(ctx context.Context, e *store.CorruptError, loc chunkindex.Location) error {
	e.Key, e.Off = pack.Key(loc.Pack), loc.Off
	s.metrics.damaged.Inc()
	if s.cfg.ReadOnly {
		if s.noteDamaged(catalog.CondemnedChunk{Digest: e.Want, Pack: loc.Pack, Off: loc.Off}) {
			s.log.WarnContext(ctx, "damaged chunk found, which the writer of the store has to condemn: run check there", "chunk", e.Want, "pack", loc.Pack, "off", loc.Off)
		}
		return e
	}
	condemned, err := s.condemnDamaged(context.WithoutCancel(ctx), e.Want, loc, false)
	if err != nil {
		s.log.ErrorContext(ctx, "damaged chunk not condemned", "chunk", e.Want, "pack", loc.Pack, "off", loc.Off, "error", err)
	} else if condemned {
		s.log.WarnContext(ctx, "damaged chunk condemned", "chunk", e.Want, "pack", loc.Pack, "off", loc.Off)
	}
	return e
}

// condemnDamaged reads the copy once more before it condemns it, and reports
// whether it did. Since the first read a Write may have stored the same pack
// anew, and promised its chunks; and what was only damaged on its way here is no
// reason to store it twice. A copy that is not there at all is not condemned, see
// unread, unless it is cutOff, of which the caller knows that its pack ends before.
func (s *Store) condemnDamaged(ctx context.Context, d chunk.Digest, loc chunkindex.Location, cutOff bool) (bool, error) {
	s.commits.Lock()
	defer s.commits.Unlock()
	if s.catalog.IsCondemned(d, loc.Pack, loc.Off) {
		_, err := s.index.DeleteIf(ctx, d, loc) // a full disk may have kept it there
		return false, err
	}
	stored := make([]byte, loc.Stored)
	switch err := s.bucket.ReadAt(ctx, pack.Key(loc.Pack), stored, loc.Off); {
	case cutOff && errors.Is(err, io.ErrUnexpectedEOF):
	case isDamage(err):
		return false, nil
	case err != nil:
		return false, err
	default:
		if _, bad := verifyStored(nil, d, loc, stored); bad == nil {
			return false, nil
		}
	}
	return true, s.condemnLocked(ctx, d, loc)
}

// GetBatch implements store.BatchGetter, with the errors of Get.
func (s *Store) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	a := answers[[]byte]{fn: fn}
	return s.eachStored(ctx, ds, func(ctx context.Context, w wanted, stored []byte, err error) error {
		if err != nil {
			return a.give(w.digest, nil, err)
		}
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		p, err := s.plain(ctx, w.digest, w.loc, stored, *buf)
		if err == nil {
			*buf = p
		}
		return a.give(w.digest, p, err)
	})
}

// StoredBatch is GetBatch without decompression, for a client that does that and
// verifies the digests.
func (s *Store) StoredBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, Stored, error) error) error {
	return s.eachStored(ctx, ds, giveStored(fn))
}

func giveStored(fn func(chunk.Digest, Stored, error) error) eachFunc {
	a := answers[Stored]{fn: fn}
	return func(_ context.Context, w wanted, stored []byte, err error) error {
		if err != nil {
			return a.give(w.digest, Stored{}, err)
		}
		return a.give(w.digest, Stored{Codec: w.loc.Codec, Len: w.loc.Len, CRC: w.loc.CRC, Bytes: stored, More: w.more}, nil)
	}
}

// answers calls fn one at a time, and no more after its first error.
type answers[T any] struct {
	fn  func(chunk.Digest, T, error) error
	mu  sync.Mutex // guards err and is held during fn
	err error
}

func (a *answers[T]) give(d chunk.Digest, v T, err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err == nil {
		a.err = a.fn(d, v, err)
	}
	return a.err
}

// wanted is one chunk of a batch.
type wanted struct {
	digest chunk.Digest
	loc    chunkindex.Location
	more   bool // the next one of the same read follows
}

type eachFunc func(ctx context.Context, w wanted, stored []byte, err error) error

// eachStored reads many chunks, neighbours in one pack by one read, and calls fn
// concurrently, once for every digest, with checked stored bytes or that
// chunk's error. It stops at the first error of fn.
func (s *Store) eachStored(ctx context.Context, ds []chunk.Digest, fn eachFunc) error {
	found, missing, err := s.locateAll(ctx, ds)
	if err != nil {
		return err
	}
	return s.readFound(ctx, found, missing, fn)
}

// readFound is eachStored for what locateAll has returned.
func (s *Store) readFound(ctx context.Context, found []wanted, missing []chunk.Digest, fn eachFunc) error {
	for _, d := range missing {
		if err := fn(ctx, wanted{digest: d}, nil, fmt.Errorf("%s: %w", d, store.ErrNotFound)); err != nil {
			return err
		}
	}
	return s.readRanges(ctx, merged(found), fn)
}

// locateAll looks digests up. Of one that is asked for twice it may find both.
func (s *Store) locateAll(ctx context.Context, ds []chunk.Digest) (found []wanted, missing []chunk.Digest, err error) {
	found = make([]wanted, 0, len(ds))
	for batch := range slices.Chunk(ds, lookupBatch) {
		locs, ok, err := s.lookup(ctx, batch)
		if err != nil {
			return nil, nil, err
		}
		for i, d := range batch {
			if ok[i] {
				s.watch(ctx, d, locs[i].Pack)
				found = append(found, wanted{digest: d, loc: locs[i]})
			} else {
				missing = append(missing, d)
			}
		}
	}
	slices.SortFunc(missing, compareDigests)
	return found, slices.Compact(missing), nil
}

// merged groups chunks into reads, in the order of pack and offset, each chunk once.
func merged(ws []wanted) [][]wanted {
	ws = inOrder(ws)
	var out [][]wanted
	start := 0
	for i := 1; i <= len(ws); i++ {
		if i < len(ws) && joins(ws[start].loc, ws[i-1].loc, ws[i].loc) {
			continue
		}
		out = append(out, ws[start:i])
		start = i
	}
	return out
}

// inOrder sorts chunks by pack and offset, and leaves each once.
func inOrder(ws []wanted) []wanted {
	byPlace := func(a, b wanted) int {
		if a.loc.Pack == b.loc.Pack {
			return cmp.Compare(a.loc.Off, b.loc.Off)
		}
		return compareDigests(a.loc.Pack, b.loc.Pack)
	}
	if !slices.IsSortedFunc(ws, byPlace) { // who asks for neighbours has them in this order
		slices.SortFunc(ws, byPlace)
	}
	return slices.Compact(ws)
}

// joins reports whether next can be read together with first to last.
func joins(first, last, next chunkindex.Location) bool {
	return next.Pack == last.Pack && next.Off-end(last) <= maxGap && end(next)-first.Off <= maxRange
}

func end(loc chunkindex.Location) int64 { return loc.Off + int64(loc.Stored) }

// ofRange returns the checked bytes of one chunk of a range that was read with err.
func (s *Store) ofRange(ctx context.Context, w wanted, stored []byte, err error) ([]byte, error) {
	if err != nil {
		return nil, s.unread(ctx, w.digest, w.loc, err)
	}
	return s.checkStored(ctx, w.digest, w.loc, stored)
}

func compareDigests(a, b chunk.Digest) int { return bytes.Compare(a[:], b[:]) }
