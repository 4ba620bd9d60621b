package node

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// smallDisk is a folder on a disk of so many bytes of its own, and fill takes all of it.
func smallDisk(t *testing.T, size int) (dir string, fill func()) {
	t.Helper()
	need.Root(t)
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir, func() {
		t.Helper()
		f, err := os.Create(filepath.Join(dir, "ballast"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for n := 1 << 20; n >= 512; n /= 2 {
			for err = nil; err == nil; {
				_, err = f.Write(make([]byte, n))
			}
		}
		if !isFull(err) {
			t.Fatal(err)
		}
	}
}

// smallWorker is a worker's folder on a small disk, see smallDisk.
func smallWorker(t *testing.T) (dir string, fill func(), d folder.Dir) {
	t.Helper()
	dir, fill = smallDisk(t, 16<<20)
	d, err := folder.Open(filepath.Join(dir, "w"))
	if err == nil {
		err = os.Mkdir(Config{Dir: d}.boxesDir(), 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, fill, d
}

// That the disk was full the next node knows, too, and when.
func TestAFullDiskIsRememberedByTheNextNode(t *testing.T) {
	dir, fill, d := smallWorker(t)
	next := func() *Node {
		n := &Node{log: slog.New(slog.DiscardHandler), c: Config{Dir: d, Now: time.Now}}
		if err := n.recallFull(); err != nil {
			t.Error(err)
		}
		return n
	}
	next()
	if n := next(); n.wasFull(time.Time{}) {
		t.Error("it was never full")
	}
	before := time.Now()
	n := next()
	fill()
	n.lookAtDisk()
	after := time.Now()
	if err := os.Remove(filepath.Join(dir, "ballast")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if n := next(); !n.wasFull(before) || n.wasFull(after) {
			t.Errorf("it was full before a time: %v, after it: %v", n.wasFull(before), n.wasFull(after))
		}
	}
	later := time.Now().Add(time.Hour) // of a clock that is set back
	if err := os.Chtimes(n.c.fullPath(), later, later); err != nil {
		t.Fatal(err)
	}
	if n := next(); n.wasFull(time.Now()) {
		t.Error("it will be full in an hour")
	}
	if info, err := os.Lstat(n.c.fullPath()); err != nil || info.ModTime().After(time.Now()) {
		t.Errorf("the mark stays one of what is to come: %v, %v", info, err)
	}
}

// A mark that there was no room for is made when there is.
func TestTheMarkOfAFullDiskIsMadeLater(t *testing.T) {
	dir, fill, d := smallWorker(t)
	n := &Node{log: slog.New(slog.DiscardHandler), c: Config{Dir: d, Now: time.Now}}
	obstacle := n.c.fullPath() + ".new"
	if err := os.Mkdir(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := n.recallFull(); err == nil {
		t.Error("a mark is made where none can be")
	}
	before := time.Now()
	fill()
	n.lookAtDisk()
	after := time.Now()
	if err := errors.Join(os.Remove(obstacle), os.Remove(filepath.Join(dir, "ballast"))); err != nil {
		t.Fatal(err)
	}
	n.lookAtDisk()
	n = &Node{log: n.log, c: n.c}
	if err := n.recallFull(); err != nil || !n.wasFull(before) || n.wasFull(after) {
		t.Errorf("it was full before a time: %v, after it: %v; %v", n.wasFull(before), n.wasFull(after), err)
	}
}

func recordOf(id string) record {
	return record{Version: recordVersion, Sandbox: sandbox.Sandbox{ID: id, State: sandbox.StateEnded, Labels: map[string]string{"a": strings.Repeat("b", 3000)}, End: &sandbox.End{Reason: sandbox.ReasonDeleted, At: time.Unix(1, 0).UTC()}}}
}

func TestRecordsAreWrittenOnAFullDisk(t *testing.T) {
	dir, fill := smallDisk(t, 16<<20)
	r := records{dir}
	if err := errors.Join(r.keepReserve(), r.keepReserve()); err != nil {
		t.Fatal(err)
	}
	fill()
	var ids []string
	for i := range 100 {
		id := strings.Repeat(string(rune('a'+i%26)), 19) + string(rune('a'+i/26))
		if err := r.save(recordOf(id)); err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
		ids = append(ids, id)
	}
	list, damaged, err := r.load()
	if err != nil || len(damaged) != 0 || len(list) != len(ids) {
		t.Errorf("%d records, %v, %v", len(list), damaged, err)
	}
	if err := r.keepReserve(); err == nil {
		t.Error("there is a reserve again, and no room")
	}
	if _, err := os.Stat(r.reserve()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("half a reserve is left: %v", err)
	}
	if err := errors.Join(os.Remove(filepath.Join(dir, "ballast")), r.keepReserve()); err != nil {
		t.Error(err)
	}
}

func TestAFolderStaysUntilItsRecordIsWritten(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{journalFile, "output", "upper"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	full := errors.New("no room")
	if err := removeFolder(dir, func() error { return full }); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != journalFile {
		t.Errorf("left: %v, %v", left, err)
	}
	saved := 0
	save := func() error { saved++; return nil }
	if err := errors.Join(removeFolder(dir, save), removeFolder(dir, save)); err != nil || saved != 2 {
		t.Errorf("saved %d times, %v", saved, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestAFullDiskIsTheNodes(t *testing.T) {
	const low = "the disk is low"
	inWords := fmt.Errorf("%w: runsc: no space left on device", sandbox.ErrRuntime)
	for _, c := range []struct {
		err  error
		low  string
		disk bool
	}{
		{inWords, low, true}, {inWords, "", false}, {errors.New("anything"), low, true}, {fmt.Errorf("%w: x", sandbox.ErrInvalid), low, false},
		{&os.PathError{Op: "write", Err: syscall.ENOSPC}, "", true}, {fmt.Errorf("%w: x", sandbox.ErrImageVerify), low, false},
		{fmt.Errorf("%w: reader: no space", sandbox.ErrImagePull), low, true},
	} {
		var busy *sandbox.Busy
		got := inContract(c.err, c.low)
		if errors.As(got, &busy) != c.disk || c.disk && (busy.RetryAfter == 0 || busy.What != "disk" || !errors.Is(got, sandbox.ErrCapacity)) {
			t.Errorf("%v, %q: %v", c.err, c.low, got)
		}
		if reason := causeOf(c.err, c.low).Reason; (reason == sandbox.ReasonDiskFull) != c.disk {
			t.Errorf("%v, %q: %s", c.err, c.low, reason)
		}
	}
	if !bytes.Contains([]byte(busyDisk(low).Error()), []byte(low)) {
		t.Error(busyDisk(low))
	}
}
