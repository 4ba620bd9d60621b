package packed_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/google/go-cmp/cmp"

	"quarry/internal/need"
	"quarry/store/bucket/buckettest"
	"quarry/store/packed"
)

// TestEveryFaultOfBucketAndJournal fails each operation of a Write once, both
// ways. Whatever became of the Write, the store is whole after a restart and the
// same Write then makes what it makes without faults.
func TestEveryFaultOfBucketAndJournal(t *testing.T) {
	ps := contents(0, 60)
	clean := newDisk()
	clean.open(t, packSize(20_000)).put(t, ps)
	want := buckettest.Keys(t, clean.bucket, "")
	for name, inject := range map[string]func(*buckettest.Faulty, func(buckettest.Op) error){
		"not applied": func(f *buckettest.Faulty, fault func(buckettest.Op) error) { f.Before = fault },
		"applied":     func(f *buckettest.Faulty, fault func(buckettest.Op) error) { f.After = fault },
	} {
		t.Run(name, func(t *testing.T) {
			faults := 0
			for k := int64(1); ; k++ {
				d := newDisk()
				f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
				o, err := d.tryOpen(t, f, f, d.fs, packSize(20_000))
				if err != nil {
					t.Fatal(err)
				}
				hit := false
				nth := buckettest.FailNth(k, "Put", "Append", "Stat", "ReadAt")
				inject(f, func(op buckettest.Op) error {
					err := nth(op)
					hit = hit || err != nil
					return err
				})
				err = putAll(t.Context(), o, ps)
				if !hit {
					break
				}
				faults++
				if err != nil && !errors.Is(err, buckettest.ErrInjected) {
					t.Errorf("fault %d: got %v, want the injected error or none", k, err)
				}
				if err == nil {
					o.wantAll(t, ps)
				}
				again := d.crash().open(t, packSize(20_000))
				again.wantClean(t)
				again.put(t, ps)
				again.wantAll(t, ps)
				again.wantClean(t)
				if got := buckettest.Keys(t, again.disk.bucket, ""); strings.Join(got, " ") != strings.Join(want, " ") {
					t.Errorf("fault %d: packs are %v, want %v", k, got, want)
				}
			}
			if faults < 6 {
				t.Errorf("only %d faults: this tests nothing", faults)
			}
		})
	}
}

func TestAFullDiskOfPacksSaysWhatToDo(t *testing.T) {
	need.Root(t)
	tmp := t.TempDir()
	if err := syscall.Mount("tmpfs", tmp, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Unmount(tmp, 0) })
	o := newDisk().open(t, func(c *packed.Config) { c.TmpDir = tmp })
	err := putAll(t.Context(), o, contents(0, 60))
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free space and try again") || !strings.Contains(err.Error(), tmp) {
		t.Errorf("got %v", err)
	}
}

// fullFS is a disk that has just too little room for a change of the index.
type fullFS struct{ vfs.FS }

func (fullFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: 31 << 20}, nil
}

func TestAFullDiskOfTheIndexIsSaidBeforeAnythingIsStored(t *testing.T) {
	d := newDisk()
	ps := contents(0, 10)
	d.open(t).put(t, ps)
	before := buckettest.Keys(t, d.bucket, "")
	o, err := d.tryOpen(t, d.bucket, d.bucket, fullFS{d.crash().fs})
	if err != nil {
		t.Fatal(err)
	}
	o.put(t, ps) // nothing new
	o.wantAll(t, ps)
	if err := putAll(t.Context(), o, contents(10, 10)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v, want ENOSPC", err)
	}
	if diff := cmp.Diff(before, buckettest.Keys(t, d.bucket, "")); diff != "" {
		t.Errorf("objects (-before +after):\n%s", diff)
	}
}

// TestEveryFaultOfTheIndexDisk fails each write of the index's files. It must
// surface; the index may then refuse all work until it is opened again.
func TestEveryFaultOfTheIndexDisk(t *testing.T) {
	ps := contents(0, 40)
	faults := 0
	for k := int32(0); ; k++ {
		d := newDisk()
		nth := errorfs.OnIndex(k)
		var armed, hit atomic.Bool // Pebble writes in goroutines of its own
		fs := errorfs.Wrap(d.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if !armed.Load() || op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
				return nil
			}
			err := nth.MaybeError(op)
			if err != nil {
				hit.Store(true)
			}
			return err
		}))
		o, err := d.tryOpen(t, d.bucket, d.bucket, fs, packSize(20_000))
		if err != nil {
			t.Fatal(err)
		}
		armed.Store(true)
		err = putAll(t.Context(), o, ps)
		armed.Store(false)
		if !hit.Load() {
			break
		}
		faults++
		if err == nil {
			t.Errorf("fault %d: the Write succeeded", k)
		}
		again := d.crash().open(t, packSize(20_000))
		again.wantClean(t)
		again.put(t, ps)
		again.wantAll(t, ps)
		again.wantClean(t)
	}
	if faults == 0 {
		t.Error("no fault was injected: this tests nothing")
	}
}
