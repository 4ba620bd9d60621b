package packed_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/bucket/buckettest"
	bucketmem "quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

// finding is what of a Problem a test compares.
type finding struct {
	Kind   packed.ProblemKind
	Chunk  chunk.Digest
	Action packed.Action
}

func (o *opened) wantFindings(t *testing.T, quick bool, want ...finding) {
	t.Helper()
	var got []finding
	for _, p := range o.check(t, quick) {
		got = append(got, finding{p.Kind, p.Chunk, p.Action})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("check found other problems:\n%s", diff)
	}
}

func TestCheckFindsAFlippedByteInEveryRegionOfAPack(t *testing.T) {
	ps := contents(0, 30)
	victim := chunk.Sum(ps[11])
	repaired := finding{packed.PackDamaged, chunk.Digest{}, packed.Repaired}
	condemned := finding{packed.ChunkDamaged, victim, packed.Condemned}
	const recordStart = -pack.RecordHeaderSize
	for name, tc := range map[string]struct {
		off  func(loc chunkindex.Location) int64 // negative: from the end of the pack
		want finding
	}{
		"header magic":          {func(chunkindex.Location) int64 { return 2 }, repaired},
		"header version":        {func(chunkindex.Location) int64 { return 9 }, repaired},
		"record tag":            {func(l chunkindex.Location) int64 { return l.Off + recordStart }, repaired},
		"record codec":          {func(l chunkindex.Location) int64 { return l.Off + recordStart + 4 }, repaired},
		"record stored length":  {func(l chunkindex.Location) int64 { return l.Off + recordStart + 9 }, repaired},
		"record digest":         {func(l chunkindex.Location) int64 { return l.Off + recordStart + 30 }, repaired},
		"first stored byte":     {func(l chunkindex.Location) int64 { return l.Off }, condemned},
		"last stored byte":      {func(l chunkindex.Location) int64 { return l.Off + int64(l.Stored) - 1 }, condemned},
		"footer entry":          {func(chunkindex.Location) int64 { return -pack.TrailerSize - 100 }, repaired},
		"footer count":          {func(chunkindex.Location) int64 { return -pack.TrailerSize }, repaired},
		"last byte of the pack": {func(chunkindex.Location) int64 { return -1 }, repaired},
	} {
		t.Run(name, func(t *testing.T) {
			o := newDisk().open(t)
			o.put(t, ps)
			loc := o.locate(t, ps[11])
			buckettest.Corrupt(t, o.disk.bucket, pack.Key(loc.Pack), tc.off(loc))
			o.wantFindings(t, false, tc.want)
			o.put(t, ps) // heals what is condemned
			o.wantAll(t, ps)
			o.wantClean(t)
			again := o.disk.crash().open(t)
			if _, err := again.Rebuild(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			again.wantAll(t, ps)
			again.wantClean(t)
		})
	}
}

// truncate cuts an object off.
func truncate(t *testing.T, b *bucketmem.Bucket, key string, size int64) {
	t.Helper()
	buckettest.Put(t, b, key, buckettest.Bytes(t, b, key)[:size])
}

func TestCheckOfACutOffPackCondemnsWhatIsLost(t *testing.T) {
	ps := contents(0, 30)
	for name, tc := range map[string]struct {
		quick bool
		into  int64 // bytes of the victim's record that are left
	}{
		"within stored bytes":        {false, pack.RecordHeaderSize + 1},
		"between records":            {false, 0},
		"within a record header":     {false, 7},
		"within stored bytes, quick": {true, pack.RecordHeaderSize + 1},
	} {
		t.Run(name, func(t *testing.T) {
			o := newDisk().open(t)
			o.put(t, ps)
			loc := o.locate(t, ps[11])
			truncate(t, o.disk.bucket, pack.Key(loc.Pack), loc.Off-pack.RecordHeaderSize+tc.into)
			got := o.check(t, tc.quick)
			if len(got) != 1+30-11 || got[0].Kind != packed.PackDamaged || got[0].Action != packed.None {
				t.Fatalf("check found %d problems, the first %v", len(got), got)
			}
			for _, p := range got[1:] {
				if p.Kind != packed.ChunkDamaged || p.Action != packed.Condemned {
					t.Errorf("check found %s", p)
				}
			}
			o.wantAll(t, ps[:11])
			o.put(t, ps)
			o.wantAll(t, ps)
			o.wantClean(t)
		})
	}
}

func TestCheckOfAPackCutOffInItsFooterRepairsIt(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 30)
	o.put(t, ps)
	key := pack.Key(o.locate(t, ps[0]).Pack)
	whole := buckettest.Bytes(t, o.disk.bucket, key)
	truncate(t, o.disk.bucket, key, int64(len(whole))-200)
	o.wantFindings(t, false, finding{packed.PackDamaged, chunk.Digest{}, packed.Repaired})
	if !bytes.Equal(buckettest.Bytes(t, o.disk.bucket, key), whole) {
		t.Error("the pack is not as it was")
	}
	o.wantClean(t)
}

func TestCheckCorrectsTheIndex(t *testing.T) {
	ps := contents(0, 30)
	victim := chunk.Sum(ps[11])
	for name, tc := range map[string]struct {
		spoil func(t *testing.T, o *opened)
		want  finding
	}{
		"an entry points to another chunk": {func(t *testing.T, o *opened) {
			other := o.locate(t, ps[4])
			wrong := pack.Entry{Digest: victim, Off: other.Off, Stored: other.Stored, Len: other.Len, Codec: other.Codec, CRC: other.CRC}
			insert(t, o, other.Pack, wrong)
		}, finding{packed.IndexWrong, victim, packed.Reindexed}},
		"an entry is missing": {func(t *testing.T, o *opened) {
			if ok, err := o.index.DeleteIf(t.Context(), victim, o.locate(t, ps[11])); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}, finding{packed.IndexMissing, victim, packed.Reindexed}},
		"an entry is for a chunk the pack does not have": {func(t *testing.T, o *opened) {
			other := o.locate(t, ps[4])
			stray := pack.Entry{Digest: chunk.Sum([]byte("stray")), Off: other.Off, Stored: other.Stored, Len: other.Len, Codec: other.Codec, CRC: other.CRC}
			insert(t, o, other.Pack, stray)
		}, finding{packed.IndexWrong, chunk.Sum([]byte("stray")), packed.Reindexed}},
	} {
		for _, quick := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				o := newDisk().open(t)
				o.put(t, ps)
				tc.spoil(t, o)
				o.wantFindings(t, quick, tc.want)
				o.wantAll(t, ps)
				o.wantClean(t)
			})
		}
	}
}

func insert(t *testing.T, o *opened, id chunk.Digest, e pack.Entry) {
	t.Helper()
	if err := o.index.InsertBatch(t.Context(), id, []pack.Entry{e}); err != nil {
		t.Fatal(err)
	}
}

// A wrong index entry gives another chunk's bytes; the digest finds it out.
func TestWrongIndexEntryNeverGivesWrongBytes(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 30)
	o.put(t, ps)
	other := o.locate(t, ps[4])
	victim := chunk.Sum(ps[11])
	insert(t, o, other.Pack, pack.Entry{Digest: victim, Off: other.Off, Stored: other.Stored, Len: other.Len, Codec: other.Codec, CRC: other.CRC})
	p, err := o.Get(t.Context(), victim, nil)
	var corrupt *store.CorruptError
	if p != nil || !errors.As(err, &corrupt) || corrupt.Got != chunk.Sum(ps[4]) {
		t.Errorf("got %d bytes, error %v", len(p), err)
	}
	o.put(t, ps)
	o.wantAll(t, ps)
	o.wantClean(t)
}

func TestRebuildWorksWithADamagedFooterAndWithoutTheIndexFolder(t *testing.T) {
	ps := contents(0, 60)
	o := newDisk().open(t, packSize(20_000))
	o.put(t, ps)
	before := o.records(t)
	for _, key := range buckettest.Keys(t, o.disk.bucket, pack.KeyPrefix)[:2] {
		buckettest.Corrupt(t, o.disk.bucket, key, -pack.TrailerSize-60)
	}
	var got []packed.ProblemKind
	if _, err := o.Rebuild(t.Context(), func(p packed.Problem) { got = append(got, p.Kind) }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]packed.ProblemKind{packed.PackDamaged, packed.PackDamaged}, got); diff != "" {
		t.Errorf("rebuild found:\n%s", diff)
	}
	if diff := cmp.Diff(before, o.records(t)); diff != "" {
		t.Errorf("rebuilt index differs:\n%.1000s", diff)
	}
	fresh := disk{o.disk.bucket.Clone(), vfs.NewCrashableMem()}.open(t)
	if diff := cmp.Diff(before, fresh.records(t)); diff != "" {
		t.Errorf("index made from nothing differs:\n%.1000s", diff)
	}
	fresh.wantAll(t, ps)
}

// TestRebuildsAtTheSameTime: each finds the index as it left it, whatever the
// others and readers do.
func TestRebuildsAtTheSameTime(t *testing.T) {
	o := newDisk().open(t, packSize(20_000))
	o.put(t, contents(0, 60))
	want := packed.RebuildStats{Packs: int64(len(o.catalog.Packs())), Chunks: 60}
	var g errgroup.Group
	for range 8 {
		g.Go(func() error {
			got, err := o.Rebuild(t.Context(), nil)
			if err == nil && got != want {
				err = fmt.Errorf("rebuilt %+v, want %+v", got, want)
			}
			return err
		})
		g.Go(func() error {
			for _, err := range o.index.All(t.Context()) {
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// TestCheckCorrectsTheSizeInTheJournal: the digest of the object says who is
// wrong.
func TestCheckCorrectsTheSizeInTheJournal(t *testing.T) {
	for _, wrong := range []int64{-1, 1} {
		d := newDisk()
		ps := contents(0, 30)
		d.open(t).put(t, ps)
		good := buckettest.Entries(t, d.bucket, 1)[0].Data
		e, err := catalog.DecodeEntry(good)
		if err != nil {
			t.Fatal(err)
		}
		p := e.(catalog.Pack)
		p.Size += wrong
		bad, err := catalog.EncodeEntry(p)
		if err != nil {
			t.Fatal(err)
		}
		j := bucketmem.New()
		if err := j.Append(t.Context(), 1, bad); err != nil {
			t.Fatal(err)
		}
		d = d.crash() // the first index stays open
		o, err := d.tryOpen(t, d.bucket, j, d.fs)
		if err != nil {
			t.Fatal(err)
		}
		o.wantFindings(t, true, finding{packed.PackDamaged, chunk.Digest{}, packed.None})
		o.wantFindings(t, false, finding{packed.PackDamaged, chunk.Digest{}, packed.Repaired})
		o.wantClean(t)
		o.wantAll(t, ps)
	}
}

func TestStoppedRebuildIsFinishedByTheNextOpen(t *testing.T) {
	d := newDisk()
	ps := contents(0, 60)
	d.open(t, packSize(20_000)).put(t, ps)
	d = d.crash()
	f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
	o, err := d.tryOpen(t, f, f, d.fs)
	if err != nil {
		t.Fatal(err)
	}
	before := o.records(t)
	f.Before = buckettest.FailNth(3, "ReadAt")
	if _, err := o.Rebuild(t.Context(), nil); !errors.Is(err, buckettest.ErrInjected) {
		t.Fatalf("got %v, want the injected error", err)
	}
	again := d.crash().open(t)
	if diff := cmp.Diff(before, again.records(t)); diff != "" {
		t.Errorf("index differs:\n%.1000s", diff)
	}
}

func TestOpenWithAMissingPackServesTheOthers(t *testing.T) {
	o := newDisk().open(t, packSize(20_000))
	ps := contents(0, 60)
	o.put(t, ps)
	lost := o.locate(t, ps[30]).Pack
	if err := o.disk.bucket.Delete(t.Context(), pack.Key(lost)); err != nil {
		t.Fatal(err)
	}
	fresh := disk{o.disk.bucket.Clone(), vfs.NewCrashableMem()}.open(t)
	for _, p := range ps {
		_, err := fresh.Get(t.Context(), chunk.Sum(p), nil)
		if o.locate(t, p).Pack == lost != errors.Is(err, store.ErrNotFound) {
			t.Errorf("get: %v", err)
		}
	}
}

func TestIndexOfPacksTheJournalDoesNotKnowIsDropped(t *testing.T) {
	o := newDisk().open(t)
	o.put(t, contents(0, 10))
	other := disk{bucketmem.New(), o.disk.fs.CrashClone(vfs.CrashCloneCfg{})}.open(t)
	if rs := other.records(t); len(rs) != 0 {
		t.Errorf("%d records of another store", len(rs))
	}
	other.put(t, contents(5, 10))
	other.wantAll(t, contents(5, 10))
	other.wantClean(t)
}
