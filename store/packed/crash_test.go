package packed_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket/buckettest"
)

// moment is what a crash at one point of a Write would leave.
type moment struct {
	name string
	disk disk
}

// momentsOfWrite crashes at every arrow of the write order: before and after
// each call on bucket and journal, and before each sync of the index.
func momentsOfWrite(t *testing.T, d disk, ps [][]byte, clone func(disk) disk) []moment {
	var (
		mu      sync.Mutex // guards what follows: the index syncs in the background
		ms      []moment
		writing bool
	)
	take := func(when, what string) {
		mu.Lock()
		defer mu.Unlock()
		if !writing {
			return
		}
		ms = append(ms, moment{fmt.Sprintf("%d: %s %s", len(ms), when, what), clone(d)})
	}
	f := &buckettest.Faulty{
		Bucket: d.bucket, Journal: d.bucket,
		Before: func(op buckettest.Op) error { take("before", op.Method); return nil },
		After:  func(op buckettest.Op) error { take("after", op.Method); return nil },
	}
	fs := errorfs.Wrap(d.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData {
			take("before", "sync of "+op.Path)
		}
		return nil
	}))
	o, err := d.tryOpen(t, f, f, fs, packSize(20_000))
	if err != nil {
		t.Fatal(err)
	}
	setWriting := func(v bool) {
		mu.Lock()
		defer mu.Unlock()
		writing = v
	}
	setWriting(true)
	o.put(t, ps)
	take("after", "the Write")
	setWriting(false)
	return ms
}

func TestCrashAtEveryArrowOfAWrite(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for name, clone := range map[string]func(disk) disk{
		"unsynced data is lost": disk.crash,
		"half of it is there": func(d disk) disk {
			return disk{d.bucket.Clone(), d.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rng})}
		},
	} {
		t.Run(name, func(t *testing.T) { testCrashes(t, clone) })
	}
}

func testCrashes(t *testing.T, clone func(disk) disk) {
	d := newDisk()
	acknowledged, more := contents(0, 20), contents(10, 40)
	first := d.open(t, packSize(20_000))
	first.put(t, acknowledged)
	if err := first.index.Close(); err != nil {
		t.Fatal(err)
	}
	ms := momentsOfWrite(t, d, more, clone)
	if len(ms) < 15 {
		t.Fatalf("only %d moments: this tests nothing", len(ms))
	}
	for i, m := range ms {
		t.Run(m.name, func(t *testing.T) {
			o := m.disk.open(t, packSize(20_000))
			o.wantClean(t)
			o.wantAll(t, acknowledged)
			if i == len(ms)-1 {
				o.wantAll(t, more)
			}
			before := o.records(t)
			if _, err := o.Rebuild(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, o.records(t)); diff != "" {
				t.Errorf("rebuilt index differs:\n%.1000s", diff)
			}
			o.put(t, more)
			o.wantAll(t, more)
			o.wantClean(t)
		})
	}
}
