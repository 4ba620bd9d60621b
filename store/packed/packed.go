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

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// Config is what a store needs. Bucket, Catalog and Index belong together: the
// index must be of no other store, or be empty.
type Config struct {
	Bucket    bucket.Bucket
	Catalog   *catalog.Catalog
	Index     *chunkindex.Index
	ChunkSize int64        // S: a longer chunk is refused; 0 = chunk.MaxSize
	PackSize  int64        // a pack of at least that many bytes is closed; 0 = pack.TargetSize
	TmpDir    string       // for packs being written; "" = os.TempDir
	Workers   int          // processors a Write or a check may use; 0 = all
	Log       *slog.Logger // nil = discard
	Metrics   *Metrics     // nil = not counted
}

// Store is a chunk store. All methods are safe for concurrent use. It owns
// neither bucket nor index: closing them is the caller's.
type Store struct {
	cfg     Config
	bucket  bucket.Bucket
	catalog *catalog.Catalog
	index   *chunkindex.Index
	log     *slog.Logger
	metrics *Metrics

	// commits is held over each change of journal and index together, so that
	// the index sees changes in the journal's order. It is taken before
	// rebuilding where both are.
	commits sync.Mutex
	// rebuilding is held for writing while the index is incomplete, and for
	// reading by each look-up.
	rebuilding sync.RWMutex
	// upkeep is held by a check or a rebuild: one at a time.
	upkeep sync.Mutex
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
	s := &Store{cfg: cfg, bucket: bucket.Metered(cfg.Bucket), catalog: cfg.Catalog, index: cfg.Index, log: cfg.Log, metrics: cfg.Metrics}
	if err := s.reconcile(ctx); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	return s, nil
}

// reconcile makes the index follow the catalog.
func (s *Store) reconcile(ctx context.Context) error {
	s.commits.Lock()
	defer s.commits.Unlock()
	packs := s.catalog.Packs()
	live := make(map[chunk.Digest]bool, len(packs))
	for _, p := range packs {
		live[p.ID] = true
	}
	for _, id := range s.index.AppliedPacks() {
		if live[id] {
			continue
		}
		if _, err := s.index.DropPack(ctx, id); err != nil {
			return err
		}
	}
	for _, p := range packs {
		if s.index.PackApplied(p.ID) {
			continue
		}
		if err := s.applyPack(ctx, p.ID); isDamage(err) {
			s.log.WarnContext(ctx, "pack is damaged, run check", "pack", p.ID, "error", err)
		} else if err != nil {
			return err
		}
	}
	return s.dropCondemned(ctx)
}

// dropCondemned finishes each Condemn that reached the journal only.
func (s *Store) dropCondemned(ctx context.Context) error {
	for batch := range slices.Chunk(s.catalog.Condemned(), lookupBatch) {
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
// the chunks found are in. The caller holds commits.
func (s *Store) applyPack(ctx context.Context, id chunk.Digest) error {
	entries, _, damage := s.entries(ctx, id)
	if damage != nil && len(entries) == 0 {
		return damage
	}
	if err := s.insertLocked(ctx, id, entries); err != nil {
		return err
	}
	return damage
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
func (s *Store) commit(ctx context.Context, id chunk.Digest, size int64, entries []pack.Entry) error {
	s.commits.Lock()
	defer s.commits.Unlock()
	again := s.catalog.HasPack(id)
	if err := s.catalog.AddPack(ctx, id, size); err != nil {
		return err
	}
	if again {
		// Its place in the journal is the old one: chunks that a later pack has too
		// stay there, as they would in a rebuilt index.
		var err error
		if entries, err = s.unknown(ctx, entries); err != nil {
			return err
		}
	}
	return s.insertLocked(ctx, id, entries)
}

// unknown returns the entries whose chunks the index does not have.
func (s *Store) unknown(ctx context.Context, entries []pack.Entry) ([]pack.Entry, error) {
	var missing []pack.Entry
	for batch := range slices.Chunk(entries, lookupBatch) {
		ds := make([]chunk.Digest, len(batch))
		for i, e := range batch {
			ds[i] = e.Digest
		}
		found, err := s.index.HasBatch(ctx, ds)
		if err != nil {
			return nil, err
		}
		for i, e := range batch {
			if !found[i] {
				missing = append(missing, e)
			}
		}
	}
	return missing, nil
}

// Condemn takes one copy of a chunk out of use, in the journal and then in the
// index, so that the next Write of the chunk stores it anew.
func (s *Store) Condemn(ctx context.Context, d chunk.Digest, loc chunkindex.Location) error {
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

// Has reports for each digest whether the store holds the chunk.
func (s *Store) Has(ctx context.Context, ds []chunk.Digest) ([]bool, error) {
	found := make([]bool, 0, len(ds))
	for batch := range slices.Chunk(ds, lookupBatch) {
		ok, err := s.has(ctx, batch)
		if err != nil {
			return nil, err
		}
		found = append(found, ok...)
	}
	return found, nil
}

func (s *Store) has(ctx context.Context, ds []chunk.Digest) ([]bool, error) {
	s.rebuilding.RLock()
	defer s.rebuilding.RUnlock()
	return s.index.HasBatch(ctx, ds)
}

func (s *Store) lookup(ctx context.Context, ds []chunk.Digest) ([]chunkindex.Location, []bool, error) {
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
