package chunkindex_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

func open(t testing.TB, fs vfs.FS) *chunkindex.Index {
	t.Helper()
	x, err := chunkindex.Open(chunkindex.Config{Dir: "index", FS: fs, CacheSize: 1 << 20})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func digest(n int) chunk.Digest {
	return chunk.Sum(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

// entries makes chunks first to first+n-1 as one pack has them.
func entries(first, n int) []pack.Entry {
	var es []pack.Entry
	for i := first; i < first+n; i++ {
		e := pack.Entry{Digest: digest(i), Off: int64(68 + i*100), Stored: uint32(i%90 + 1), Len: uint32(i%90 + 2), Codec: pack.Zstd, CRC: uint32(i)}
		if i%2 == 0 {
			e.Codec, e.Len = pack.Raw, e.Stored
		}
		es = append(es, e)
	}
	return es
}

func insert(t testing.TB, x *chunkindex.Index, id chunk.Digest, es []pack.Entry) {
	t.Helper()
	if err := x.InsertBatch(t.Context(), id, es); err != nil {
		t.Fatal(err)
	}
}

func wantAt(t testing.TB, x *chunkindex.Index, id chunk.Digest, es []pack.Entry) {
	t.Helper()
	locs, found := lookup(t, x, es)
	for i, e := range es {
		if want := chunkindex.At(id, e); !found[i] || locs[i] != want {
			t.Fatalf("%s: found %t at %+v, want %+v", e.Digest, found[i], locs[i], want)
		}
	}
}

func wantNone(t testing.TB, x *chunkindex.Index, es []pack.Entry) {
	t.Helper()
	if _, found := lookup(t, x, es); slices.Contains(found, true) {
		t.Fatalf("found %v, want none", found)
	}
}

func lookup(t testing.TB, x *chunkindex.Index, es []pack.Entry) ([]chunkindex.Location, []bool) {
	t.Helper()
	var ds []chunk.Digest
	for _, e := range es {
		ds = append(ds, e.Digest)
	}
	locs, found, err := x.LookupBatch(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	return locs, found
}

func all(t testing.TB, x *chunkindex.Index) []chunkindex.Record {
	t.Helper()
	var rs []chunkindex.Record
	for r, err := range x.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		rs = append(rs, r)
	}
	return rs
}

func TestInsertAndLookUp(t *testing.T) {
	fs := vfs.NewMem()
	x := open(t, fs)
	p1, p2 := digest(-1), digest(-2)
	insert(t, x, p1, entries(0, 1000))
	insert(t, x, p2, entries(1000, 500))
	for range 2 { // as written, and after a restart
		wantAt(t, x, p1, entries(0, 1000))
		wantAt(t, x, p2, entries(1000, 500))
		wantNone(t, x, entries(1500, 300))
		if !x.PackApplied(p1) || !x.PackApplied(p2) || x.PackApplied(digest(-3)) {
			t.Error("wrong packs are applied")
		}
		rs := all(t, x)
		if len(rs) != 1500 || !slices.IsSortedFunc(rs, func(a, b chunkindex.Record) int { return bytes.Compare(a.Digest[:], b.Digest[:]) }) {
			t.Errorf("%d records, want 1500 in order", len(rs))
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
		x = open(t, fs)
	}
}

func TestLaterPackWins(t *testing.T) {
	x := open(t, vfs.NewMem())
	insert(t, x, digest(-1), entries(0, 10))
	insert(t, x, digest(-2), entries(5, 10))
	wantAt(t, x, digest(-1), entries(0, 5))
	wantAt(t, x, digest(-2), entries(5, 10))
	insert(t, x, digest(-1), entries(5, 1))
	wantAt(t, x, digest(-1), entries(0, 6))
}

func TestDeleteIfComparesTheLocation(t *testing.T) {
	x := open(t, vfs.NewMem())
	id, es := digest(-1), entries(0, 3)
	insert(t, x, id, es)
	stale := chunkindex.At(id, es[1])
	stale.Off++
	if ok, err := x.DeleteIf(t.Context(), es[1].Digest, stale); ok || err != nil {
		t.Errorf("stale location: %t, %v", ok, err)
	}
	wantAt(t, x, id, es)
	for i, want := range []bool{true, false} {
		if ok, err := x.DeleteIf(t.Context(), es[1].Digest, chunkindex.At(id, es[1])); ok != want || err != nil {
			t.Errorf("delete %d: %t, %v", i, ok, err)
		}
	}
	wantNone(t, x, es[1:2])
	wantAt(t, x, id, es[2:])
}

func TestDropPackAndReset(t *testing.T) {
	fs := vfs.NewMem()
	x := open(t, fs)
	p1, p2 := digest(-1), digest(-2)
	insert(t, x, p1, entries(0, 100))
	insert(t, x, p2, entries(50, 100))
	if n, err := x.DropPack(t.Context(), p1); n != 50 || err != nil {
		t.Errorf("dropped %d, %v, want 50", n, err)
	}
	if n, err := x.DropPack(t.Context(), p1); n != 0 || err != nil {
		t.Errorf("dropped again %d, %v", n, err)
	}
	wantNone(t, x, entries(0, 50))
	wantAt(t, x, p2, entries(50, 100))
	if diff := cmp.Diff([]chunk.Digest{p2}, x.AppliedPacks()); diff != "" {
		t.Error(diff)
	}
	if err := x.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(all(t, x)) != 0 || len(x.AppliedPacks()) != 0 {
		t.Error("not empty after a reset")
	}
	insert(t, x, p1, entries(7, 7))
	x.Close()
	x = open(t, fs)
	wantAt(t, x, p1, entries(7, 7))
	if len(all(t, x)) != 7 {
		t.Error("the reset was undone by a restart")
	}
}

func TestIterationKnowsThePacksOfItsRecords(t *testing.T) {
	x := open(t, vfs.NewMem())
	insert(t, x, digest(-1), entries(0, 300))
	var g errgroup.Group
	g.Go(func() error {
		for i := 2; i < 20; i++ {
			if err := x.InsertBatch(t.Context(), digest(-i), entries(0, 300)); err != nil {
				return err
			}
			if _, err := x.DropPack(t.Context(), digest(-i+1)); err != nil {
				return err
			}
		}
		return nil
	})
	for range 20 {
		if n := len(all(t, x)); n != 300 {
			t.Errorf("%d records, want 300", n)
		}
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// TestIterationSurvivesAReset: the view and its pack table are of one moment.
func TestIterationSurvivesAReset(t *testing.T) {
	x := open(t, vfs.NewMem())
	var g errgroup.Group
	done := make(chan struct{})
	g.Go(func() error {
		defer close(done)
		for i := range 200 {
			if err := x.InsertBatch(t.Context(), digest(-1-i), entries(0, 20)); err != nil {
				return err
			}
			if err := x.Reset(t.Context()); err != nil {
				return err
			}
		}
		return nil
	})
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		if n := len(all(t, x)); n != 0 && n != 20 {
			t.Errorf("%d records, want none or 20", n)
		}
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestInsertedIsDurable(t *testing.T) {
	fs := vfs.NewCrashableMem()
	x := open(t, fs)
	id, es := digest(-1), entries(0, 50)
	insert(t, x, id, es)
	if ok, err := x.DeleteIf(t.Context(), es[0].Digest, chunkindex.At(id, es[0])); !ok || err != nil {
		t.Fatal(ok, err)
	}
	after := open(t, fs.CrashClone(vfs.CrashCloneCfg{}))
	wantAt(t, after, id, es[1:])
	wantNone(t, after, es[:1])
}

func TestCancelledAndClosed(t *testing.T) {
	x := open(t, vfs.NewMem())
	insert(t, x, digest(-1), entries(0, 5))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, err := range calls(ctx, x) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want context.Canceled", name, err)
		}
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if err := x.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	for name, err := range calls(t.Context(), x) {
		if err == nil || !strings.Contains(err.Error(), "closed") {
			t.Errorf("%s after close: got %v", name, err)
		}
	}
	x.Stats()
}

// calls makes every call that can fail.
func calls(ctx context.Context, x *chunkindex.Index) map[string]error {
	errs := map[string]error{"All": nil}
	_, _, errs["LookupBatch"] = x.LookupBatch(ctx, []chunk.Digest{digest(0)})
	errs["InsertBatch"] = x.InsertBatch(ctx, digest(-1), entries(0, 1))
	_, errs["DeleteIf"] = x.DeleteIf(ctx, digest(0), chunkindex.At(digest(-1), entries(0, 1)[0]))
	_, errs["DropPack"] = x.DropPack(ctx, digest(-1))
	errs["Reset"] = x.Reset(ctx)
	for _, err := range x.All(ctx) {
		errs["All"] = err
	}
	return errs
}

func TestOneProcessOwnsTheFolder(t *testing.T) {
	dir := t.TempDir()
	x, err := chunkindex.Open(chunkindex.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if second, err := chunkindex.Open(chunkindex.Config{Dir: dir}); err == nil {
		second.Close()
		t.Error("the folder was opened twice")
	}
}

func TestOtherSchemaVersionsAreRefused(t *testing.T) {
	fs := vfs.NewMem()
	open(t, fs).Close()
	db, err := pebble.Open("index", &pebble.Options{FS: fs, Logger: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Set([]byte("v"), []byte("3"), pebble.Sync), db.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := chunkindex.Open(chunkindex.Config{Dir: "index", FS: fs}); err == nil || !strings.Contains(err.Error(), `version "3"`) {
		t.Errorf("got %v", err)
	}
}

// quiet is a Pebble logger that says nothing.
type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}
func (quiet) Fatalf(string, ...any) { panic("pebble") }

func TestImpossibleValuesAreErrors(t *testing.T) {
	x := open(t, vfs.NewMem())
	insert(t, x, digest(-1), []pack.Entry{{Digest: digest(1), Off: 68, Stored: 5, Len: chunk.MaxSize + 1, Codec: pack.Zstd}})
	if _, _, err := x.LookupBatch(t.Context(), []chunk.Digest{digest(1)}); err == nil {
		t.Error("a length over the limit was returned")
	}
}

// TestDamagedFilesNeverGiveWrongLocations flips bytes in the table files. Each
// look-up is right or an error.
func TestDamagedFilesNeverGiveWrongLocations(t *testing.T) {
	id, es := digest(-1), entries(0, 5_000)
	rng := rand.New(rand.NewPCG(3, 4))
	failures := 0
	for range 10 {
		fs := vfs.NewMem() // each time anew: Open moves some damaged ones aside
		x := open(t, fs)
		insert(t, x, id, es)
		x.Close()
		open(t, fs).Close() // replays the log into a table
		tables := tableFiles(t, fs)
		flip(t, fs, tables[rng.IntN(len(tables))], rng.Float64())
		damaged, err := chunkindex.Open(chunkindex.Config{Dir: "index", FS: fs, CacheSize: 1 << 20})
		if err != nil {
			failures++
			continue
		}
		for range 4 { // 500 look-ups anywhere are enough to meet most blocks
			batch := es[rng.IntN(len(es)-500):][:500]
			var ds []chunk.Digest
			for _, e := range batch {
				ds = append(ds, e.Digest)
			}
			locs, found, err := damaged.LookupBatch(t.Context(), ds)
			if err != nil {
				failures++
				continue
			}
			for i, e := range batch {
				if found[i] && locs[i] != chunkindex.At(id, e) {
					t.Fatalf("%s: %+v, want %+v", e.Digest, locs[i], chunkindex.At(id, e))
				}
			}
		}
		damaged.Close()
	}
	if failures == 0 {
		t.Error("no damage was met: this tests nothing")
	}
}

func tableFiles(t *testing.T, fs vfs.FS) []string {
	names, err := fs.List("index")
	if err != nil {
		t.Fatal(err)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".sst") })
	if len(names) == 0 {
		t.Fatal("no table files: this tests nothing")
	}
	return names
}

// flip changes one byte of a file, at a fraction of its length.
func flip(t *testing.T, fs vfs.FS, name string, at float64) {
	path := fs.PathJoin("index", name)
	f, err := fs.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	old, err := io.ReadAll(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	bad := slices.Clone(old)
	bad[int(at*float64(len(bad)))] ^= 0xff
	f, err = fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(bad); err != nil {
		t.Fatal(err)
	}
	f.Close()
}

func TestReadErrorsSurface(t *testing.T) {
	mem := vfs.NewMem()
	x := open(t, mem)
	es := entries(0, 5_000)
	insert(t, x, digest(-1), es)
	x.Close()
	open(t, mem).Close()
	var broken atomic.Bool // Pebble reads in goroutines of its own
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && op.Kind == errorfs.OpFileReadAt {
			return errorfs.ErrInjected
		}
		return nil
	}))
	x = open(t, fs)
	broken.Store(true)
	failures := 0
	for _, e := range es[:100] {
		_, found, err := x.LookupBatch(t.Context(), []chunk.Digest{e.Digest})
		if err == nil && !found[0] {
			t.Fatal("a read error became not found")
		}
		if err != nil {
			failures++
		}
	}
	if failures == 0 {
		t.Error("no read failed: this tests nothing")
	}
	broken.Store(false)
}
