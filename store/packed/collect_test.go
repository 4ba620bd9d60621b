package packed_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

func liveOnly(ps [][]byte) func(*chunk.Digest) bool {
	live := map[chunk.Digest]bool{}
	for _, p := range ps {
		live[chunk.Sum(p)] = true
	}
	return func(d *chunk.Digest) bool { return live[*d] }
}

func noBad(t *testing.T) func(chunk.Digest, error) {
	return func(id chunk.Digest, err error) { t.Errorf("pack %s is called damaged: %v", id, err) }
}

// packsOf are the packs of the catalog.
func (o *opened) packsOf() []chunk.Digest {
	var ids []chunk.Digest
	for _, p := range o.catalog.Packs() {
		ids = append(ids, p.ID)
	}
	return ids
}

// collect empties packs and deletes them.
func (o *opened) collect(t *testing.T, ids []chunk.Digest, keep [][]byte) (retired []chunk.Digest) {
	t.Helper()
	ctx, live := t.Context(), liveOnly(keep)
	if err := o.CondemnPacks(ctx, ids); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Copy(ctx, ids, live, noBad(t)); err != nil {
		t.Fatal(err)
	}
	retired, err := o.Retire(ctx, ids, live)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Forget(ctx); err != nil {
		t.Fatal(err)
	}
	for _, id := range retired {
		if deleted, err := o.DeletePack(ctx, id); !deleted || err != nil {
			t.Fatalf("delete pack: %t, %v", deleted, err)
		}
	}
	return retired
}

func TestLiveChunksAreCopiedOutOfACondemnedPack(t *testing.T) {
	d := newDisk()
	o := d.open(t, packSize(20_000))
	all := contents(0, 30)
	o.put(t, all)
	before := o.packsOf()
	if retired := o.collect(t, before, all[:10]); len(retired) != len(before) {
		t.Errorf("%d of %d packs retired", len(retired), len(before))
	}
	o.wantAll(t, all[:10])
	for _, p := range all[10:] {
		if _, err := o.Get(t.Context(), chunk.Sum(p), nil); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("a dead chunk: got %v, want ErrNotFound", err)
		}
	}
	o.wantClean(t)
	for _, id := range before {
		if _, err := d.bucket.Stat(t.Context(), pack.Key(id)); !errors.Is(err, bucket.ErrNotFound) {
			t.Errorf("pack %s is still there: %v", id, err)
		}
	}
	again := d.crash().open(t)
	again.wantAll(t, all[:10])
	again.wantClean(t)
}

func TestACondemnedPackHoldsNothing(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 5)
	o.put(t, ps)
	ids := o.packsOf()
	if err := o.CondemnPacks(t.Context(), ids); err != nil {
		t.Fatal(err)
	}
	has, err := o.Has(t.Context(), []chunk.Digest{chunk.Sum(ps[0])})
	if err != nil || has[0] {
		t.Errorf("Has: got %v, %v, want false", has, err)
	}
	o.wantAll(t, ps) // reads go on
	// The same again makes the same pack, which then stays.
	o.put(t, ps)
	if o.catalog.IsPackCondemned(ids[0]) {
		t.Error("the pack is condemned although it was stored anew")
	}
	retired, err := o.Retire(t.Context(), ids, liveOnly(nil))
	if err != nil || len(retired) != 0 {
		t.Errorf("Retire: got %v, %v, want none", retired, err)
	}
	o.wantAll(t, ps)
}

// TestADeletedPackComesBackUnderAnotherID: who deletes may be stopped for hours right
// before, so nothing may be stored where it will strike.
func TestADeletedPackComesBackUnderAnotherID(t *testing.T) {
	d := newDisk()
	o := d.open(t)
	ps := contents(0, 5)
	o.put(t, ps)
	first := o.packsOf()
	o.collect(t, first, nil)
	o.put(t, ps)
	second := o.packsOf()
	if len(second) != 1 || second[0] == first[0] {
		t.Fatalf("packs %v after %v", second, first)
	}
	if err := d.bucket.Delete(t.Context(), pack.Key(first[0])); err != nil { // at last
		t.Fatal(err)
	}
	o.wantAll(t, ps)
	o.collect(t, second, nil)
	o.put(t, ps)
	third := o.packsOf()
	if len(third) != 1 || third[0] == first[0] || third[0] == second[0] {
		t.Errorf("packs %v after %v and %v", third, first, second)
	}
	o.wantAll(t, ps)
	o.wantClean(t)
}

func TestAReadOfACondemnedChunkRaisesAnAlarm(t *testing.T) {
	var log bytes.Buffer
	o := newDisk().open(t, func(c *packed.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	ps := contents(0, 6)
	o.put(t, ps)
	ids := o.packsOf()
	if err := o.CondemnPacks(t.Context(), ids); err != nil {
		t.Fatal(err)
	}
	o.wantAll(t, ps)
	if strings.Contains(log.String(), "alarm") {
		t.Errorf("an alarm before anything was copied:\n%s", &log)
	}
	if _, err := o.Copy(t.Context(), ids, liveOnly(ps[:3]), noBad(t)); err != nil {
		t.Fatal(err)
	}
	o.wantAll(t, ps)
	if strings.Contains(log.String(), "alarm") {
		t.Errorf("an alarm while conversions may count on the pack:\n%s", &log)
	}
	o.Drain(ids)
	o.wantAll(t, ps[:3])
	if strings.Contains(log.String(), "alarm") {
		t.Errorf("an alarm for chunks that were copied:\n%s", &log)
	}
	o.wantAll(t, ps[3:]) // the right bytes all the same
	if n := strings.Count(log.String(), "alarm"); n != 1 {
		t.Errorf("%d alarms, want one for the pack:\n%s", n, &log)
	}
}

// A pack that is live after all is copied to itself, which ends its condemnation. A later
// collection condemns it again, and has drained nothing yet.
func TestADrainedPackThatWasStoredAnewRaisesNoAlarm(t *testing.T) {
	var log bytes.Buffer
	o := newDisk().open(t, func(c *packed.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	ps := contents(0, 6)
	o.put(t, ps)
	ids := o.packsOf()
	for range 2 {
		if err := o.CondemnPacks(t.Context(), ids); err != nil {
			t.Fatal(err)
		}
		o.wantAll(t, ps)
		if _, err := o.Copy(t.Context(), ids, liveOnly(ps), noBad(t)); err != nil {
			t.Fatal(err)
		}
		o.Drain(ids)
	}
	if strings.Contains(log.String(), "alarm") {
		t.Errorf("an alarm for what an earlier collection drained:\n%s", &log)
	}
}

func TestADamagedCopyIsNotCopied(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 6)
	o.put(t, ps)
	ids := o.packsOf()
	o.damage(t, ps[2])
	if err := o.CondemnPacks(t.Context(), ids); err != nil {
		t.Fatal(err)
	}
	bad := 0
	if _, err := o.Copy(t.Context(), ids, liveOnly(ps), func(chunk.Digest, error) { bad++ }); err != nil {
		t.Fatal(err)
	}
	if bad != 1 {
		t.Errorf("%d packs are called damaged, want 1", bad)
	}
	o.wantAll(t, ps[:2])
	o.wantAll(t, ps[3:])
}

// TestTheLastGoodCopyIsKept: the index forgot the damaged copy and does not know yet
// that another pack has the chunk.
func TestTheLastGoodCopyIsKept(t *testing.T) {
	d := newDisk()
	o := d.open(t)
	shared := contents(0, 1)
	o.put(t, append(contents(10, 3), shared...))
	loc := o.locate(t, shared[0])
	if err := o.Condemn(t.Context(), chunk.Sum(shared[0]), loc); err != nil {
		t.Fatal(err)
	}
	o.put(t, append(contents(20, 3), shared...))
	second := o.packsOf()[1]
	loc = o.locate(t, shared[0])
	if loc.Pack != second {
		t.Fatalf("the chunk is in %s", loc.Pack)
	}
	if _, err := o.index.DeleteIf(t.Context(), chunk.Sum(shared[0]), loc); err != nil {
		t.Fatal(err)
	}
	o.collect(t, []chunk.Digest{second}, shared)
	o.wantAll(t, shared)
}

func TestSurvey(t *testing.T) {
	d := newDisk()
	o := d.open(t)
	ps := contents(0, 8)
	o.put(t, ps[:4])
	o.put(t, ps[4:])
	lost, orphan := o.packsOf()[1], chunk.Sum([]byte("orphan"))
	if err := d.bucket.Put(t.Context(), pack.Key(orphan), strings.NewReader("x"), 1); err != nil {
		t.Fatal(err)
	}
	sv, err := o.Survey(t.Context(), liveOnly(ps[:4]))
	if err != nil {
		t.Fatal(err)
	}
	if len(sv.Uses) != 2 || sv.Uses[0].Live != 4 || sv.Uses[1].Live != 0 || sv.Uses[1].Chunks != 4 || !sv.Uses[0].Sound {
		t.Errorf("uses %+v", sv.Uses)
	}
	if sv.Uses[0].LiveBytes != sv.Uses[0].ChunkBytes {
		t.Errorf("a pack that is live as a whole: %d of %d bytes", sv.Uses[0].LiveBytes, sv.Uses[0].ChunkBytes)
	}
	if len(sv.Orphans) != 1 || sv.Orphans[0].Key != pack.Key(orphan) {
		t.Errorf("orphans %v", sv.Orphans)
	}
	if err := d.bucket.Delete(t.Context(), pack.Key(lost)); err != nil {
		t.Fatal(err)
	}
	if sv, err = o.Survey(t.Context(), liveOnly(nil)); err != nil || sv.Uses[1].Sound {
		t.Errorf("a pack without an object is sound: %+v, %v", sv.Uses, err)
	}
}
