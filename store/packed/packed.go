// Package packed is the real chunk store: chunks compressed in packs in a
// bucket, found through the chunk index. It is where the order of writes is
// kept, so that a crash at any moment leaves garbage and never a chunk that was
// promised and cannot be read.
package packed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/bucket/ranges"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// Config is what a store needs. Bucket, Catalog and Index belong together: the
// index must be of no other store, or be empty.
type Config struct {
	Bucket    bucket.Bucket
	Ranges    *ranges.Cache // of Bucket, through which chunks are read; nil = none
	Catalog   *catalog.Catalog
	Index     Index
	ChunkSize int64        // S: a longer chunk is refused; 0 = chunk.MaxSize
	PackSize  int64        // a pack of at least that many bytes is closed; 0 = pack.TargetSize
	TmpDir    string       // for packs being written; "" = os.TempDir
	Workers   int          // processors a Write or a check may use; 0 = all
	MinExtent int64        // what StoredRecords sends has extents of so many bytes on average; 0 = 32 KiB
	Log       *slog.Logger // nil = discard
	Metrics   *Metrics     // nil = not counted

	// ReadOnly: another process writes the store, and this one follows it (Follow). It
	// changes nothing but its index; what would fails with store.ErrReadOnly.
	ReadOnly bool

	Now func() time.Time // nil = time.Now; for how often reads ask for packs that are late
}

// lateEvery is how often look-ups for reads ask whether packs that are late came
// back, so that those of chunks that nobody has do not ask for each of them.
const lateEvery = time.Second

// Store is a chunk store. All methods are safe for concurrent use. It owns
// neither bucket nor index: closing them is the caller's.
type Store struct {
	cfg     Config
	bucket  bucket.Bucket
	catalog *catalog.Catalog
	index   Index
	log     *slog.Logger
	metrics *Metrics

	flights flights             // ranges of packs being read
	helpers *semaphore.Weighted // of maxHelpers
	sends   *semaphore.Weighted // of maxSendFiles

	// commits is held over each change of journal and index together, so that
	// the index sees changes in the journal's order. It is taken before
	// rebuilding where both are.
	commits sync.Mutex
	// rebuilding is held for writing while the index is incomplete, and for
	// reading by each look-up.
	rebuilding sync.RWMutex
	// upkeep is held by a check or a rebuild: one at a time.
	upkeep sync.Mutex

	// broken are packs that a read or a look-up found missing or cut off. They are
	// asked for again before anything is said of their chunks.
	broken packSet
	// late are packs of the journal that the index lacks because they could not be
	// read whole when it was made. A look-up that finds nothing tries them again.
	late      packSet
	lateTurn  chan struct{} // has an element while a look-up does that; guards lateAsked
	lateAsked time.Time     // when one last did

	// behind: the catalog has entries that the index may lack; guarded by commits.
	behind bool

	damagedMu sync.Mutex // guards damagedHere
	// damagedHere are the copies that reads of a ReadOnly store found damaged.
	damagedHere map[catalog.CondemnedChunk]struct{}
	// drained are those of Drain: a read of such a pack is an alarm. alarmed are those
	// that had one.
	drained, alarmed packSet
}

var (
	_ store.Store       = (*Store)(nil)
	_ store.BatchGetter = (*Store)(nil)
)

// Open brings the index up to what the journal says and returns the store. What
// a crash left between journal and index is mended here, by the functions that
// write it otherwise. A pack that is missing or damaged is logged: the rest of
// the store stays usable, and Check tells more.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.ChunkSize == 0 {
		cfg.ChunkSize = chunk.MaxSize
	}
	if !chunk.ValidSize(cfg.ChunkSize) {
		return nil, fmt.Errorf("open store: chunk size %d is not a power of two from %d to %d", cfg.ChunkSize, chunk.MinSize, chunk.MaxSize)
	}
	if cfg.PackSize == 0 {
		cfg.PackSize = pack.TargetSize
	}
	if cfg.PackSize < 0 || cfg.PackSize > pack.MaxPack/2 {
		return nil, fmt.Errorf("open store: pack size %d is not 1 to %d", cfg.PackSize, pack.MaxPack/2)
	}
	if cfg.MinExtent == 0 {
		cfg.MinExtent = minExtent
	}
	if cfg.TmpDir == "" {
		cfg.TmpDir = os.TempDir()
	}
	if cfg.Workers == 0 {
		cfg.Workers = runtime.GOMAXPROCS(0)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics()
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	s := &Store{cfg: cfg, bucket: bucket.Metered(cfg.Bucket), catalog: cfg.Catalog, index: cfg.Index, log: cfg.Log, metrics: cfg.Metrics, lateTurn: make(chan struct{}, 1),
		helpers: semaphore.NewWeighted(maxHelpers), sends: semaphore.NewWeighted(maxSendFiles), damagedHere: map[catalog.CondemnedChunk]struct{}{}}
	if err := s.reconcile(ctx); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	return s, nil
}

// reconcile makes the index follow the catalog.
func (s *Store) reconcile(ctx context.Context) error {
	s.commits.Lock()
	defer s.commits.Unlock()
	return s.reconcileLocked(ctx)
}

func (s *Store) reconcileLocked(ctx context.Context) error {
	packs := s.catalog.Packs()
	if err := s.forgetLocked(ctx); err != nil {
		return err
	}
	for _, p := range packs {
		if s.index.PackApplied(p.ID) {
			continue
		}
		if err := s.applyListed(ctx, p.ID); err != nil {
			return err
		}
	}
	// An index that was not there when chunks were condemned and then lifted may lack
	// those: it is of a node that was down meanwhile.
	for _, id := range s.catalog.Lifted() {
		if err := s.applyAgain(ctx, id); err != nil {
			return err
		}
	}
	return s.dropCopies(ctx, s.catalog.Condemned())
}

// applyListed is applyPack for a pack that may be missing or damaged.
func (s *Store) applyListed(ctx context.Context, id chunk.Digest) error {
	err := s.applyPack(ctx, id)
	if isDamage(err) {
		s.log.WarnContext(ctx, "pack is missing or damaged, run check", "pack", id, "error", err)
		return nil
	}
	return err
}

// dropCopies finishes each Condemn that reached the journal only.
func (s *Store) dropCopies(ctx context.Context, condemned []catalog.CondemnedChunk) error {
	for batch := range slices.Chunk(condemned, lookupBatch) {
		ds := make([]chunk.Digest, len(batch))
		for i, c := range batch {
			ds[i] = c.Digest
		}
		locs, found, err := s.index.LookupBatch(ctx, ds)
		if err != nil {
			return err
		}
		for i, c := range batch {
			if !found[i] || locs[i].Pack != c.Pack || locs[i].Off != c.Off {
				continue
			}
			if _, err := s.index.DeleteIf(ctx, c.Digest, locs[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// applyPack puts a pack of the catalog into the index from its footer, or from
// its records when the footer is damaged; the damage is then returned though
// the chunks found are in. A pack that is missing or cut off is late, and nothing
// of it is in: the index cannot say of a pack that it has a part. The caller holds
// commits.
func (s *Store) applyPack(ctx context.Context, id chunk.Digest) error {
	entries, size, damage := s.entries(ctx, id)
	if want, _ := s.catalog.PackSize(id); isDamage(damage) && size < want {
		s.late.add(id)
		return damage
	}
	if damage != nil && len(entries) == 0 {
		return damage
	}
	if err := s.insertLocked(ctx, id, entries); err != nil {
		return err
	}
	return damage
}

// applyLate puts the packs into the index that are late and whole by now.
func (s *Store) applyLate(ctx context.Context) error {
	for _, id := range s.late.list() {
		if err := s.applyIfLate(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// applyIfLate is applyLate for one pack.
func (s *Store) applyIfLate(ctx context.Context, id chunk.Digest) error {
	if !s.late.has(id) {
		return nil
	}
	s.commits.Lock()
	defer s.commits.Unlock()
	want, known := s.catalog.PackSize(id)
	if !known {
		s.late.remove(id)
	}
	if !s.late.has(id) {
		return nil // another look-up has put it in
	}
	// Looked at first: of a pack that is cut off, entries reads all that there is.
	o, err := s.bucket.Stat(ctx, pack.Key(id))
	if err != nil && !isDamage(err) {
		return err
	}
	if err != nil || o.Size < want {
		return nil
	}
	entries, size, damage := s.entries(ctx, id)
	if damage != nil && !isDamage(damage) {
		return damage
	}
	if size < want || damage != nil && len(entries) == 0 {
		return nil // it has its length, and its bytes are still to come
	}
	if err := s.addLocked(ctx, id, entries); err != nil {
		return err
	}
	s.late.remove(id)
	s.log.InfoContext(ctx, "pack that was missing is in the index", "pack", id, "damage", damage)
	return nil
}

// addLocked is insertLocked for a pack whose place in the journal is an old one:
// chunks that a later pack has too stay there, as they would in a rebuilt index,
// unless that pack is missing.
func (s *Store) addLocked(ctx context.Context, id chunk.Digest, entries []pack.Entry) error {
	l := &looks{s: s, sizes: map[chunk.Digest]int64{}}
	var missing []pack.Entry
	for batch := range slices.Chunk(entries, lookupBatch) {
		held, err := s.held(ctx, l, digestsOf(batch))
		if err != nil {
			return err
		}
		for i, e := range batch {
			if !held[i] {
				missing = append(missing, e)
			}
		}
	}
	if len(missing) == 0 && s.index.PackApplied(id) {
		return nil
	}
	return s.insertLocked(ctx, id, missing)
}

// insertLocked points the chunks of a pack there, except copies that are
// condemned. The caller holds commits.
func (s *Store) insertLocked(ctx context.Context, id chunk.Digest, entries []pack.Entry) error {
	usable := make([]pack.Entry, 0, len(entries))
	for _, e := range entries {
		if !s.catalog.IsCondemned(e.Digest, id, e.Off) {
			usable = append(usable, e)
		}
	}
	return s.index.InsertBatch(ctx, id, usable)
}

// commit makes a pack that is durable in the bucket part of the store: journal
// first, then index. A crash between the two is mended by reconcile.
func (s *Store) commit(ctx context.Context, l *looks, p *sealed) error {
	s.commits.Lock()
	defer s.commits.Unlock()
	lost, err := s.lost(ctx, l, p.entries)
	if err != nil {
		return err
	}
	again := s.catalog.HasPack(p.id)
	if err := s.catalog.AddPack(ctx, p.id, p.size); err != nil {
		return err
	}
	if again {
		err = s.addLocked(ctx, p.id, p.entries)
	} else {
		err = s.insertLocked(ctx, p.id, p.entries)
	}
	for _, cc := range lost {
		err = errors.Join(err, s.catalog.Condemn(ctx, cc))
	}
	return err
}

// Condemn takes one copy of a chunk out of use, in the journal and then in the
// index, so that the next Write of the chunk stores it anew.
func (s *Store) Condemn(ctx context.Context, d chunk.Digest, loc chunkindex.Location) error {
	if err := s.writable("condemn chunk " + d.String()); err != nil {
		return err
	}
	s.commits.Lock()
	defer s.commits.Unlock()
	return s.condemnLocked(ctx, d, loc)
}

func (s *Store) condemnLocked(ctx context.Context, d chunk.Digest, loc chunkindex.Location) error {
	err := s.catalog.Condemn(ctx, catalog.CondemnedChunk{Digest: d, Pack: loc.Pack, Off: loc.Off})
	// Also without the journal a bad copy is better out of the index: a rebuild
	// may bring it back, and the next read finds it again.
	_, indexErr := s.index.DeleteIf(ctx, d, loc)
	return errors.Join(err, indexErr)
}

// Has reports for each digest whether the store holds the chunk, so that it need not be
// written: one in a pack that is missing now, or that gc empties, it does not.
func (s *Store) Has(ctx context.Context, ds []chunk.Digest) ([]bool, error) {
	return s.has(ctx, ds, false)
}

// Readable is Has for who reads: what is in packs that gc empties is there too.
func (s *Store) Readable(ctx context.Context, ds []chunk.Digest) ([]bool, error) {
	return s.has(ctx, ds, true)
}

func (s *Store) has(ctx context.Context, ds []chunk.Digest, emptied bool) ([]bool, error) {
	l, err := s.newLooks(ctx)
	if err != nil {
		return nil, err
	}
	l.emptied = emptied
	found := make([]bool, 0, len(ds))
	for batch := range slices.Chunk(ds, lookupBatch) {
		ok, err := s.held(ctx, l, batch)
		if err != nil {
			return nil, err
		}
		found = append(found, ok...)
	}
	return found, nil
}

// lookup returns for each digest its Location and whether there is one, for a read.
func (s *Store) lookup(ctx context.Context, ds []chunk.Digest) ([]chunkindex.Location, []bool, error) {
	complete := s.late.empty() // what is late leaves the set after it is in the index
	locs, found, err := s.lookupNow(ctx, ds)
	if err != nil || complete || !slices.Contains(found, false) {
		return locs, found, err
	}
	if err := s.askForLate(ctx); err != nil {
		return nil, nil, err
	}
	return s.lookupNow(ctx, ds)
}

// askForLate is applyLate unless that was done just now. It waits for another
// look-up that does it, which may find what this one wants.
func (s *Store) askForLate(ctx context.Context) error {
	select {
	case s.lateTurn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.lateTurn }()
	if since := s.cfg.Now().Sub(s.lateAsked); 0 <= since && since < lateEvery {
		return nil
	}
	err := s.applyLate(ctx)
	if err == nil {
		s.lateAsked = s.cfg.Now()
	}
	return err
}

func (s *Store) lookupNow(ctx context.Context, ds []chunk.Digest) ([]chunkindex.Location, []bool, error) {
	s.rebuilding.RLock()
	defer s.rebuilding.RUnlock()
	return s.index.LookupBatch(ctx, ds)
}

// entries lists a pack from its footer. When that is damaged it returns what the
// records say together with the damage.
func (s *Store) entries(ctx context.Context, id chunk.Digest) (entries []pack.Entry, size int64, err error) {
	o, err := s.bucket.Stat(ctx, pack.Key(id))
	if err != nil {
		return nil, 0, fmt.Errorf("pack %s: %w", id, err)
	}
	r := s.object(ctx, id)
	entries, err = pack.ReadFooter(r, o.Size)
	if isDamage(err) {
		var scanErr error
		if entries, scanErr = pack.ScanRecords(r, o.Size); scanErr != nil && !isDamage(scanErr) {
			entries, err = nil, nil // what was read before says nothing of the pack
		}
		err = errors.Join(err, scanErr)
	}
	if err != nil {
		err = fmt.Errorf("pack %s: %w", id, err)
	}
	return entries, o.Size, err
}

// isDamage is bucket.IsDamage, and true also of bytes that are no pack.
func isDamage(err error) bool {
	return errors.As(err, new(*pack.FormatError)) || bucket.IsDamage(err)
}

// object reads a pack as an io.ReaderAt, for the time of one call.
func (s *Store) object(ctx context.Context, id chunk.Digest) io.ReaderAt {
	key := pack.Key(id)
	return readerAt(func(p []byte, off int64) (int, error) {
		if err := s.bucket.ReadAt(ctx, key, p, off); err != nil {
			return 0, err
		}
		return len(p), nil
	})
}

type readerAt func(p []byte, off int64) (int, error)

func (f readerAt) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }
