package packed_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
	"quarry/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		o := newDisk().open(t, packSize(300_000))
		return storetest.Harness{
			Getter: o, BatchGetter: o, Store: o,
			Damage: func(t *testing.T, d chunk.Digest) {
				locs, found, err := o.index.LookupBatch(t.Context(), []chunk.Digest{d})
				if err != nil || !found[0] {
					t.Fatalf("look up %s: %v, %v", d, found, err)
				}
				buckettest.Corrupt(t, o.disk.bucket, pack.Key(locs[0].Pack), locs[0].Off)
			},
		}
	})
}

func TestWriteStatsCountOnlyNewChunksAsNew(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 300)
	write := func(ps [][]byte) packed.Stats {
		st, err := o.WriteStats(t.Context(), func(ctx context.Context, w store.Putter) error {
			for _, p := range ps {
				if _, err := w.Put(ctx, p); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	first := write(append(slices.Clone(ps), ps...)) // repetitions in one Write
	if first.Chunks != 600 || first.NewChunks != 300 || first.PlainBytes != 2*first.NewPlainBytes {
		t.Errorf("first write: %+v", first)
	}
	var stored int64
	for _, r := range o.records(t) {
		stored += int64(r.Stored)
	}
	if first.NewStoredBytes != stored || stored >= first.NewPlainBytes {
		t.Errorf("stored %d bytes, index says %d, plain are %d", first.NewStoredBytes, stored, first.NewPlainBytes)
	}
	packs := len(o.catalog.Packs())
	if again := write(ps); again.Chunks != 300 || again.NewChunks+again.NewPlainBytes+again.NewStoredBytes != 0 {
		t.Errorf("second write: %+v", again)
	}
	if got := len(o.catalog.Packs()); got != packs {
		t.Errorf("second write made %d packs", got-packs)
	}
	o.wantAll(t, ps)
	o.wantClean(t)
}

func TestSamePutsMakeSamePacksWhateverTheWorkers(t *testing.T) {
	ps := contents(0, 1500)
	var want []string
	for _, workers := range []int{1, 2, 8} {
		o := newDisk().open(t, packSize(500_000), func(c *packed.Config) { c.Workers = workers })
		o.put(t, append(slices.Clone(ps), ps[:700]...))
		got := buckettest.Keys(t, o.disk.bucket, pack.KeyPrefix)
		if len(got) < 5 {
			t.Fatalf("only %d packs: this tests nothing", len(got))
		}
		if want == nil {
			want = got
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d workers made other packs:\n%s", workers, diff)
		}
	}
}

func TestFailedWriteLeavesNoPackOpen(t *testing.T) {
	o := newDisk().open(t)
	mine := errors.New("mine")
	err := o.Write(t.Context(), func(ctx context.Context, w store.Putter) error {
		if _, err := w.Put(ctx, []byte("x")); err != nil {
			return err
		}
		return mine
	})
	if !errors.Is(err, mine) {
		t.Fatalf("got %v", err)
	}
	if keys := buckettest.Keys(t, o.disk.bucket, ""); len(keys) != 0 {
		t.Errorf("objects left: %v", keys)
	}
	o.wantClean(t)
}

func TestWriteWithPanickingFnEndsItsStages(t *testing.T) {
	o := newDisk().open(t)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_ = o.Write(t.Context(), func(context.Context, store.Putter) error { panic("fn") })
	}()
	ps := contents(0, 10)
	o.put(t, ps)
	o.wantAll(t, ps)
}

func TestConcurrentWritesWithOverlap(t *testing.T) {
	o := newDisk().open(t, packSize(200_000))
	var g errgroup.Group
	for i := range 3 {
		g.Go(func() error { return putAll(t.Context(), o, contents(i*200, 600)) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	o.wantAll(t, contents(0, 1000))
	o.wantClean(t)
	before := o.records(t)
	if _, err := o.Rebuild(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, o.records(t)); diff != "" {
		t.Errorf("rebuilt index differs:\n%.2000s", diff)
	}
}

func TestStoredBytesDecodeToTheChunk(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 50)
	o.put(t, ps)
	plain := map[chunk.Digest][]byte{}
	for _, p := range ps {
		plain[chunk.Sum(p)] = p
	}
	verify := func(d chunk.Digest, st packed.Stored) error {
		if st.CRC != pack.Checksum(st.Bytes) {
			return fmt.Errorf("checksum %08x", st.CRC)
		}
		p, err := pack.Decode(nil, st.Codec, st.Bytes, st.Len)
		if err == nil && !bytes.Equal(p, plain[d]) {
			err = fmt.Errorf("%s decodes to other bytes", d)
		}
		return err
	}
	var ds []chunk.Digest
	for d := range plain {
		ds = append(ds, d)
	}
	calls := 0
	err := o.StoredBatch(t.Context(), ds, func(d chunk.Digest, st packed.Stored, err error) error {
		calls++
		return errors.Join(err, verify(d, st))
	})
	if err != nil || calls != len(ds) {
		t.Errorf("%d of %d answers, error %v", calls, len(ds), err)
	}
}

func TestBatchReadsNeighboursTogether(t *testing.T) {
	d := newDisk()
	ps := contents(0, 400)
	d.open(t).put(t, ps)
	reads := 0
	counting := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket, Before: func(op buckettest.Op) error {
		if op.Method == "ReadAt" {
			reads++
		}
		return nil
	}}
	o, err := d.crash().tryOpen(t, counting, counting, d.crash().fs, func(c *packed.Config) { c.Workers = 1 })
	if err != nil {
		t.Fatal(err)
	}
	var ds []chunk.Digest
	for _, p := range ps {
		ds = append(ds, chunk.Sum(p))
	}
	reads = 0
	if err := o.GetBatch(t.Context(), ds, func(_ chunk.Digest, _ []byte, err error) error { return err }); err != nil {
		t.Fatal(err)
	}
	if reads > 3 {
		t.Errorf("%d reads for 400 chunks of one pack", reads)
	}
}

func TestDamagedChunkIsCondemnedByTheReadAndStoredAnewByTheNextWrite(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 20)
	o.put(t, ps)
	loc := o.damage(t, ps[7])
	d := chunk.Sum(ps[7])
	_, err := o.Get(t.Context(), d, nil)
	var corrupt *store.CorruptError
	if !errors.As(err, &corrupt) || corrupt.Want != d || corrupt.Key != pack.Key(loc.Pack) || corrupt.Off != loc.Off {
		t.Fatalf("got %v", err)
	}
	if !o.catalog.IsCondemned(d, loc.Pack, loc.Off) {
		t.Error("the copy is not condemned in the journal")
	}
	if _, err := o.Get(t.Context(), d, nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("second get: %v, want store.ErrNotFound", err)
	}
	o.put(t, ps)
	o.wantAll(t, ps)
	o.wantClean(t)

	again := o.disk.crash().open(t)
	again.wantAll(t, ps)
	if _, err := again.Rebuild(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	again.wantAll(t, ps)
	again.wantClean(t)
}

// The pack that heals can be byte for byte the damaged one: same chunks, same
// order, same id. Its chunks must not stay condemned.
func TestHealingByTheSamePack(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(3, 1)
	o.put(t, ps)
	loc := o.damage(t, ps[0])
	if _, err := o.Get(t.Context(), chunk.Sum(ps[0]), nil); err == nil {
		t.Fatal("damage was not found")
	}
	o.put(t, ps)
	if got := o.locate(t, ps[0]); got != loc {
		t.Fatalf("stored at %v, want %v: this tests nothing", got, loc)
	}
	o.wantAll(t, ps)
	o.wantClean(t)
	again := o.disk.crash().open(t)
	again.wantAll(t, ps)
	again.wantClean(t)
}

func TestDamageOnTheWayIsNoReasonToCondemn(t *testing.T) {
	d := newDisk()
	ps := contents(0, 3)
	d.open(t).put(t, ps)
	d = d.crash()
	fault := buckettest.FailNth(1, "ReadAt")
	bent := bendReads{Faulty: &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}, bend: fault}
	o, err := d.tryOpen(t, bent, d.bucket, d.fs)
	if err != nil {
		t.Fatal(err)
	}
	var corrupt *store.CorruptError
	if _, err := o.Get(t.Context(), chunk.Sum(ps[0]), nil); !errors.As(err, &corrupt) {
		t.Fatalf("got %v, want *store.CorruptError", err)
	}
	o.wantAll(t, ps)
	if c := o.catalog.Condemned(); len(c) != 0 {
		t.Errorf("condemned: %v", c)
	}
}

// bendReads flips a byte of what a read returns where bend returns an error.
type bendReads struct {
	*buckettest.Faulty
	bend func(buckettest.Op) error
}

func (b bendReads) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	err := b.Faulty.ReadAt(ctx, key, p, off)
	if b.bend(buckettest.Op{Method: "ReadAt", Key: key}) != nil {
		p[0] ^= 1
	}
	return err
}

func TestManyReadersOfOneDamagedChunk(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 5)
	o.put(t, ps)
	o.damage(t, ps[2])
	var g errgroup.Group
	for range 64 {
		g.Go(func() error {
			p, err := o.Get(t.Context(), chunk.Sum(ps[2]), nil)
			if err == nil {
				return fmt.Errorf("%d bytes of a damaged chunk", len(p))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if c := o.catalog.Condemned(); len(c) != 1 {
		t.Errorf("%d copies condemned, want 1", len(c))
	}
}

func TestBucketThatCannotBeReachedIsNoDamage(t *testing.T) {
	d := newDisk()
	ps := contents(0, 5)
	d.open(t).put(t, ps)
	d = d.crash()
	f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
	o, err := d.tryOpen(t, f, f, d.fs)
	if err != nil {
		t.Fatal(err)
	}
	f.Before = buckettest.FailAll("ReadAt")
	_, err = o.Get(t.Context(), chunk.Sum(ps[0]), nil)
	var corrupt *store.CorruptError
	if !errors.Is(err, buckettest.ErrInjected) || errors.As(err, &corrupt) {
		t.Errorf("got %v", err)
	}
	answers := 0
	err = o.GetBatch(t.Context(), []chunk.Digest{chunk.Sum(ps[0]), chunk.Sum(ps[1])}, func(_ chunk.Digest, _ []byte, err error) error {
		answers++
		if !errors.Is(err, buckettest.ErrInjected) {
			t.Errorf("got %v", err)
		}
		return nil
	})
	if err != nil || answers != 2 {
		t.Errorf("%d answers, error %v", answers, err)
	}
	if c := o.catalog.Condemned(); len(c) != 0 {
		t.Errorf("condemned: %v", c)
	}
}

func TestOpenRefusesBadConfig(t *testing.T) {
	d := newDisk()
	for name, change := range map[string]func(*packed.Config){
		"chunk size":  func(c *packed.Config) { c.ChunkSize = 5000 },
		"pack size 1": packSize(-1),
		"pack size 2": packSize(pack.MaxPack),
	} {
		if _, err := d.crash().tryOpen(t, d.bucket, d.bucket, d.crash().fs, change); err == nil || !strings.Contains(err.Error(), "size") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestChunksLongerThanTheStoresAreRefused(t *testing.T) {
	o := newDisk().open(t, func(c *packed.Config) { c.ChunkSize = 4096 })
	o.put(t, [][]byte{make([]byte, 4096)})
	if err := putAll(t.Context(), o, [][]byte{make([]byte, 4097)}); err == nil {
		t.Error("a chunk of 4097 bytes was taken")
	}
}
