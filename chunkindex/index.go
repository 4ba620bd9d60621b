// Package chunkindex maps chunk digests to where the chunks are stored. It is
// derived data, rebuilt from the journal and the packs, so that a store can
// answer "which of these chunks are new" for thousands of digests without
// asking the bucket. It is the only package that imports Pebble.
package chunkindex

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"quarry/store/chunk"
	"quarry/store/pack"
)

const (
	// DefaultCacheSize keeps the index blocks and filters of some ten million
	// chunks in memory.
	DefaultCacheSize = 64 << 20
	// memTableSize holds the entries of about four full packs before a flush.
	memTableSize = 16 << 20
	// formatVersion pins what Pebble writes, so that updating the module does
	// not by itself make the folder unreadable for the program before it.
	formatVersion = pebble.FormatTableFormatV6
)

// Config says where an index is and how much memory it may take.
type Config struct {
	Dir       string       // folder, created when missing
	FS        vfs.FS       // nil = the operating system's
	CacheSize int64        // of the block cache in bytes; 0 = DefaultCacheSize
	Log       *slog.Logger // nil = discard
}

// Location is where one copy of a chunk is stored.
type Location struct {
	Pack   chunk.Digest
	Off    int64  // of the stored bytes in the pack
	Stored uint32 // length of the stored bytes
	Len    uint32 // length of the plain bytes
	Codec  pack.Codec
	CRC    uint32 // pack.Checksum of the stored bytes
}

// At returns the Location of an entry of a pack.
func At(id chunk.Digest, e pack.Entry) Location {
	return Location{Pack: id, Off: e.Off, Stored: e.Stored, Len: e.Len, Codec: e.Codec, CRC: e.CRC}
}

// Record is one line of the index.
type Record struct {
	Digest chunk.Digest
	Location
}

// Index is a chunk index. All methods are safe for concurrent use.
type Index struct {
	db   *pebble.DB
	fs   vfs.FS
	dir  string
	lock *pebble.Lock // of the folder

	mu       sync.RWMutex // guards what follows; held for writing by every change of the database
	packs    packTable
	whole    uint32 // the chunks of packs from this number on are all in the index
	unusable error  // closed, or a failed commit: Pebble takes no further one

	siblings siblings
	recent   recent
}

// load checks the version and reads the pack table.
func (x *Index) load() error {
	version := currentVersion
	v, closer, err := x.db.Get([]byte(versionKey))
	switch {
	case errors.Is(err, pebble.ErrNotFound):
		if err := x.db.Set([]byte(versionKey), []byte(version), pebble.Sync); err != nil {
			return err
		}
	case err != nil:
		return err
	default:
		version = string(v)
		if err := closer.Close(); err != nil {
			return err
		}
		if version != currentVersion && version != firstVersion {
			return fmt.Errorf("%w %q, this program reads %q", errVersion, version, currentVersion)
		}
	}
	if x.packs, err = loadPackTable(x.db); err != nil {
		return err
	}
	return x.loadWhole(version)
}

// Close releases the folder; the index then refuses all work. A second Close
// does nothing, nor does one after a failed commit: Pebble then still holds
// locks, which only the end of the process releases.
func (x *Index) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.unusable != nil {
		return nil
	}
	x.unusable = errors.New("chunk index is closed")
	return errors.Join(x.db.Close(), x.lock.Close())
}

// StoredSizes returns what chunks take in packs, -1 for one that is in none.
func (x *Index) StoredSizes(ctx context.Context, ds []chunk.Digest) ([]int64, error) {
	locs, found, err := x.LookupBatch(ctx, ds)
	if err != nil {
		return nil, err
	}
	sizes := make([]int64, len(ds))
	for i := range ds {
		sizes[i] = -1
		if found[i] {
			sizes[i] = int64(locs[i].Stored)
		}
	}
	return sizes, nil
}

// LookupBatch returns for each digest its Location and whether there is one.
func (x *Index) LookupBatch(ctx context.Context, ds []chunk.Digest) ([]Location, []bool, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if err := x.usable(ctx); err != nil {
		return nil, nil, err
	}
	locs, found := make([]Location, len(ds)), make([]bool, len(ds))
	rest := x.recent.find(ds, locs, found)
	if len(rest) == 0 {
		return locs, found, nil
	}
	asked := make([]chunk.Digest, len(rest))
	for k, i := range rest {
		asked[k] = ds[i]
	}
	restLocs, restFound, err := x.lookupBatch(asked)
	if err != nil {
		return nil, nil, err
	}
	x.recent.add(asked, restLocs, restFound)
	for k, i := range rest {
		locs[i], found[i] = restLocs[k], restFound[k]
	}
	return locs, found, nil
}

// lookupBatch is LookupBatch in the database, for a holder of mu.
func (x *Index) lookupBatch(ds []chunk.Digest) ([]Location, []bool, error) {
	// In key order neighbouring look-ups touch the same blocks.
	order := make([]int, len(ds))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return slices.Compare(ds[a][:], ds[b][:]) })
	locs, found := make([]Location, len(ds)), make([]bool, len(ds))
	// One iterator for the batch saves most of what a single Get costs, and a
	// seek by prefix, here the whole key, still asks the filters: also those of
	// the bottom level, which has nine of ten keys, where Pebble does so only
	// when told.
	it, err := x.db.NewIter(&pebble.IterOptions{UseL6Filters: true})
	if err != nil {
		return nil, nil, fmt.Errorf("look up chunks: %w", err)
	}
	key := make([]byte, 0, 33)
	for _, i := range order {
		key = append(append(key[:0], chunkPrefix), ds[i][:]...)
		if found[i] = it.SeekPrefixGE(key); !found[i] {
			if err := it.Error(); err != nil {
				return nil, nil, fmt.Errorf("look up chunk %s: %w", ds[i], errors.Join(err, it.Close()))
			}
			continue
		}
		v, err := it.ValueAndErr()
		if err == nil {
			locs[i], err = x.packs.decode(v)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("look up chunk %s: %w", ds[i], errors.Join(err, it.Close()))
		}
	}
	return locs, found, it.Close()
}

func (x *Index) lookup(d chunk.Digest) (Location, bool, error) {
	v, closer, err := x.db.Get(chunkKey(d))
	if errors.Is(err, pebble.ErrNotFound) {
		return Location{}, false, nil
	}
	if err != nil {
		return Location{}, false, err
	}
	loc, err := x.packs.decode(v)
	return loc, err == nil, errors.Join(err, closer.Close())
}

// InsertBatch points the chunks of a pack there, replacing earlier Locations,
// and marks the pack as applied. All of it is durable, or none.
//
// It looks the chunks up first: what moves here is no more a sibling there.
func (x *Index) InsertBatch(ctx context.Context, id chunk.Digest, entries []pack.Entry) error {
	var moved bool
	err := x.change(ctx, func(b *pebble.Batch) (err error) {
		if moved, err = x.moveSiblings(b, id, entries); err != nil {
			return err
		}
		n, known := x.packs.numbers[id]
		if !known {
			n = x.packs.next
			if err := b.Set(packKey(n), id[:], nil); err != nil {
				return err
			}
		}
		for _, e := range entries {
			if err := b.Set(chunkKey(e.Digest), encode(n, e), nil); err != nil {
				return err
			}
		}
		return putDigests(b, n, entries)
	}, func() {
		x.packs.add(id)
		for _, e := range entries {
			x.recent.forget(e.Digest)
		}
		if moved {
			x.siblings.clear()
		}
	})
	if err != nil {
		return fmt.Errorf("insert %d chunks of pack %s: %w", len(entries), id, err)
	}
	return nil
}

// PackApplied reports whether InsertBatch was done for that pack.
func (x *Index) PackApplied(id chunk.Digest) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	_, ok := x.packs.numbers[id]
	return ok
}

// DeleteIf removes a chunk when it is still at that Location and reports
// whether it was.
func (x *Index) DeleteIf(ctx context.Context, d chunk.Digest, loc Location) (bool, error) {
	deleted := false
	err := x.change(ctx, func(b *pebble.Batch) error {
		got, found, err := x.lookup(d)
		if err != nil || !found || got != loc {
			return err
		}
		deleted = true
		if err := b.Delete(chunkKey(d), nil); err != nil {
			return err
		}
		return x.endWhole(b)
	}, x.removed)
	if err != nil {
		return false, fmt.Errorf("delete chunk %s: %w", d, err)
	}
	return deleted, nil
}

// Reset empties the index, before a rebuild.
func (x *Index) Reset(ctx context.Context) error {
	err := x.change(ctx, func(b *pebble.Batch) error {
		if err := b.DeleteRange([]byte{chunkPrefix}, []byte{chunkPrefix + 1}, nil); err != nil {
			return err
		}
		if err := b.DeleteRange([]byte{packPrefix}, []byte{digestsPrefix + 1}, nil); err != nil {
			return err
		}
		return x.endWhole(b)
	}, func() {
		x.removed()
		next := x.packs.next // a number is never used for a second pack
		x.packs = newPackTable()
		x.packs.next = next
	})
	if err != nil {
		return fmt.Errorf("reset chunk index: %w", err)
	}
	return nil
}

// change fills one batch, commits it durably and then updates memory.
func (x *Index) change(ctx context.Context, fill func(*pebble.Batch) error, done func()) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := x.usable(ctx); err != nil {
		return err
	}
	b := x.db.NewBatch()
	if err := fill(b); err != nil {
		return errors.Join(err, b.Close())
	}
	if b.Empty() {
		return b.Close()
	}
	if err := room(x.fs, x.dir, commitRoom); err != nil {
		return errors.Join(err, b.Close())
	}
	if err := guard(func() error { return b.Commit(pebble.Sync) }); err != nil {
		x.unusable = fmt.Errorf("chunk index takes no more changes after a failed write, restart to recover it: %w", explain(err))
		return x.unusable
	}
	done()
	return b.Close()
}

func (x *Index) usable(ctx context.Context) error {
	if x.unusable != nil {
		return x.unusable
	}
	return ctx.Err()
}

// AppliedPacks returns the packs InsertBatch was done for, in digest order.
func (x *Index) AppliedPacks() []chunk.Digest {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(x.packs.numbers), func(a, b chunk.Digest) int {
		return slices.Compare(a[:], b[:])
	})
}

// All yields every record in digest order, as of the start of the iteration.
func (x *Index) All(ctx context.Context) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		x.mu.RLock()
		err := x.usable(ctx)
		if err != nil {
			x.mu.RUnlock()
			yield(Record{}, err)
			return
		}
		// View and pack table are of one moment, in which they agree.
		it, err := x.newRecordIter(ctx)
		packs := x.packs.clone()
		x.mu.RUnlock()
		yieldRecords(ctx, it, packs, err, yield)
	}
}

func (x *Index) newRecordIter(ctx context.Context) (*pebble.Iterator, error) {
	return x.db.NewIterWithContext(ctx, &pebble.IterOptions{
		LowerBound: []byte{chunkPrefix}, UpperBound: []byte{chunkPrefix + 1},
	})
}

// yieldRecords yields what it has and closes it, unless opening it failed with
// openErr.
func yieldRecords(ctx context.Context, it *pebble.Iterator, packs packTable, openErr error, yield func(Record, error) bool) {
	fail := func(err error) { yield(Record{}, fmt.Errorf("list chunk index: %w", err)) }
	if openErr != nil {
		fail(openErr)
		return
	}
	for it.First(); it.Valid(); it.Next() {
		r, err := decodeRecord(packs, it)
		if err = errors.Join(err, ctx.Err()); err != nil {
			fail(errors.Join(err, it.Close()))
			return
		}
		if !yield(r, nil) {
			_ = it.Close() // its errors concern records nobody asked for
			return
		}
	}
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		fail(err)
	}
}

func decodeRecord(packs packTable, it *pebble.Iterator) (Record, error) {
	v, err := it.ValueAndErr()
	if err != nil {
		return Record{}, err
	}
	d, err := decodeChunkKey(it.Key())
	if err != nil {
		return Record{}, err
	}
	loc, err := packs.decode(v)
	if err != nil {
		return Record{}, fmt.Errorf("chunk %s: %w", d, err)
	}
	return Record{d, loc}, nil
}

// Stats are the figures of an index.
type Stats struct {
	Packs      int   // applied packs
	DiskBytes  int64 // on disk, log included
	CacheBytes int64 // block cache in use
}

// Stats returns the figures as of now.
func (x *Index) Stats() Stats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if x.unusable != nil {
		return Stats{}
	}
	m := x.db.Metrics()
	return Stats{len(x.packs.numbers), int64(m.DiskSpaceUsage()), m.BlockCache.Size}
}
