package node

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// imageRig is the folder of an image's mount that nobody has mounted.
type imageRig struct {
	*testing.T
	dir string
	*worker.Mount
}

func newImageRig(t *testing.T) imageRig {
	t.Helper()
	d, err := folder.Open(filepath.Join(t.TempDir(), "w"))
	if err != nil {
		t.Fatal(err)
	}
	r := imageRig{T: t, dir: filepath.Join(d.Mounts(), "image")}
	err = os.MkdirAll(filepath.Join(r.dir, "refs"), 0o700)
	if err == nil {
		r.Mount, err = (&worker.Worker{Dir: d}).Inherited(filepath.Join(r.dir, "refs", "ref"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// serves has a process serve the image, under which so many reads have failed.
func (r imageRig) serves(pid int, failed uint64) worker.Served {
	r.Helper()
	start, err := attach.ProcessStart(pid)
	counts := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, failed), 1)
	if err = errors.Join(err, os.WriteFile(filepath.Join(r.dir, "eio"), counts, 0o600), attach.State{PID: pid, Start: start}.Write(r.dir)); err != nil {
		r.Fatal(err)
	}
	return worker.Served{PID: pid, Start: start}
}

// isServed has this process serve the image.
func (r imageRig) isServed(failed uint64) {
	r.Helper()
	r.serves(os.Getpid(), failed)
	lock, err := os.Create(filepath.Join(r.dir, "lock"))
	if err == nil {
		r.Cleanup(func() { lock.Close() })
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		r.Fatal(err)
	}
}

// Reads of the image that failed before a hibernation have failed, also when who counted
// them has ended meanwhile, and the node with it: before a wake, and after one.
func TestReadsThatFailedBeforeAHibernation(t *testing.T) {
	r, im := newBoxRig(t), newImageRig(t)
	shim := exec.Command("sleep", "1000")
	if err := shim.Start(); err != nil {
		t.Fatal(err)
	}
	end := func() { _ = shim.Process.Kill(); _ = shim.Wait() }
	t.Cleanup(end)
	r.b.mount, r.b.j = im.Mount, sampleJournal()
	r.b.j.Phase, r.b.j.Cause, r.b.j.Served = phaseRunning, nil, im.serves(shim.Process.Pid, 7)
	r.b.j.Served.FailedReads = 4 // before it had the image
	if err := r.locked(func() error { return errors.Join(r.b.hold(byCall), r.b.hibernate()) }); err != nil {
		t.Fatal(err)
	}
	end()
	raw, err := os.ReadFile(filepath.Join(r.b.dir, journalFile))
	if err != nil {
		t.Fatal(err)
	}
	r.next()
	r.b.mount = im.Mount
	if r.b.j, err = decodeJournal(raw); err == nil {
		err = errors.Join(r.b.connect(t.Context()), r.b.takePause())
	}
	if err != nil {
		t.Fatal(err)
	}
	ended := func(want int64) {
		t.Helper()
		f := facts{asked: &cause{Reason: sandbox.ReasonDeleted}}
		r.b.imageErrors(t.Context(), &f)
		if e := f.ended(); e.Reason != sandbox.ReasonImageIO || e.Blame != sandbox.BlameInfra || e.Evidence.ImageIOErrors != want {
			t.Errorf("%d reads have failed: %+v", want, e)
		}
	}
	ended(3)
	if u, err := r.b.n.Usage(t.Context(), r.b.id); err != nil || u.ImageErrors != 3 {
		t.Errorf("while it is hibernated: %+v, %v", u, err)
	}
	im.isServed(2) // by another one, for others
	if err := r.b.n.Wake(t.Context(), r.b.id); err != nil {
		t.Fatal(err)
	}
	ended(3)
	im.serves(os.Getpid(), 4)
	ended(5)
}

// A sandbox whose image nobody serves is not put to disk, where nobody would notice.
func TestWhoseReadsFailUncountedIsNotPutToDisk(t *testing.T) {
	r, im := newBoxRig(t), newImageRig(t)
	r.b.mount, r.b.j.Served = im.Mount, im.serves(os.Getpid(), 0)
	r.b.j.Served.Start++ // it was another one
	err := r.locked(func() error { return errors.Join(r.b.hold(byCall), r.b.hibernate()) })
	if !errors.Is(err, holder.ErrNotHibernated) || !strings.Contains(err.Error(), "image") || r.b.napping() {
		t.Errorf("hibernated %v: %v", r.b.napping(), err)
	}
}
