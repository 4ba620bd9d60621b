package holder

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/fdpass"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
	"quarry/worker/session"
)

// FuzzRecords takes any bytes for a record: what is accepted is what would be
// written for its value.
func FuzzRecords(f *testing.F) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	code := 3
	f.Add(marshal(runRecord{runFormat, "id", State{PID: 1, Started: now}}))
	f.Add(marshal(execRecord{execFormat, 1, "sum", sandbox.ExecState{ID: "a", State: sandbox.ExecExited, Started: now, Ended: &now, ExitCode: &code}}))
	f.Add(marshal(endedRecord{endedFormat, Ended{Init: &sentry.Status{Code: 1}, At: now, Message: "é\n"}}))
	f.Add(marshal(savedRecord{savedFormat, []savedFile{{"a.img", 1, 2}, {"b.img", 0, 1<<32 - 1}}}))
	f.Add(marshal(savedRecord{savedFormat, []savedFile{{"../a", 1, 2}}}))
	f.Add([]byte(`{"format":"quarry-exec/2"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeRecord[runRecord](b); err == nil && !bytes.Equal(marshal(r), b) {
			t.Errorf("%q is another %q", b, marshal(r))
		}
		if r, err := decodeRecord[execRecord](b); err == nil && !bytes.Equal(marshal(r), b) {
			t.Errorf("%q is another %q", b, marshal(r))
		}
		if r, err := decodeSaved(b); err == nil && (!bytes.Equal(marshal(r), b) || !r.valid()) {
			t.Errorf("%q is another %q", b, marshal(r))
		}
		if r, err := decodeRecord[endedRecord](b); err == nil && !bytes.Equal(marshal(r), b) {
			t.Errorf("%q is another %q", b, marshal(r))
		}
	})
}

// FuzzJournal reads any bytes as a journal. What it finds, a journal of it has too.
func FuzzJournal(f *testing.F) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	line := func(n int64, id, state string) []byte {
		return append(marshal(execRecord{execFormat, n, "sum", sandbox.ExecState{ID: id, State: state, Started: now}}), '\n')
	}
	f.Add(bytes.Join([][]byte{line(1, "a", sandbox.ExecStarting), line(2, "b", sandbox.ExecStarting), line(1, "a", sandbox.ExecExited)}, nil))
	f.Add(append(line(1, "a", sandbox.ExecStarting)[:40], append([]byte("\n"), line(3, "b", sandbox.ExecStarting)...)...))
	f.Add(append(line(1, "a", sandbox.ExecStarting), line(1, "b", sandbox.ExecStarting)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		states, _ := readJournal(bytes.NewReader(b))
		var again []byte
		for i, st := range states {
			again = append(again, marshal(execRecord{execFormat, int64(i + 1), "", st})...)
			again = append(again, '\n')
		}
		same, err := readJournal(bytes.NewReader(again))
		if err != nil || !bytes.Equal(marshal(same), marshal(states)) {
			t.Errorf("%q: %v", b, err)
		}
	})
}

// A line that did not fit spoils no other.
func TestATornJournal(t *testing.T) {
	dir := t.TempDir()
	j, err := openJournal(dir, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	rec := func(n int64, id string) execRecord {
		return execRecord{execFormat, n, "sum", sandbox.ExecState{ID: id, State: sandbox.ExecExited, Started: time.Now().UTC().Round(0)}}
	}
	if err := j.add(rec(1, "a")); err != nil {
		t.Fatal(err)
	}
	if _, err := j.f.Write(marshal(rec(2, "b"))[:50]); err != nil {
		t.Fatal(err)
	}
	j.torn = true
	if err := j.add(rec(3, "c")); err != nil {
		t.Fatal(err)
	}
	states, err := ReadExecs(dir)
	if err == nil || len(states) != 2 || states[0].ID != "a" || states[1].ID != "c" {
		t.Errorf("%+v, %v", states, err)
	}
}

// FuzzMessage sends any bytes to what reads messages: it takes what send would
// write, and nothing else.
func FuzzMessage(f *testing.F) {
	f.Add(append(header{0, 2}.encode(), "{}"...))
	f.Add(append(header{1, 2}.encode(), "{}"...))
	f.Add(header{0, maxBody}.encode())
	f.Add([]byte(magic))
	f.Add([]byte("qhld\x00\x01\x00\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		here, there := pair(t)
		defer there.Close()
		go func() {
			here.Write(b)
			here.Close()
		}()
		body, files, err := receive(there)
		if err != nil {
			if len(files) > 0 {
				t.Error("files of no message")
			}
			return
		}
		if want := append((header{0, len(body)}).encode(), body...); !bytes.HasPrefix(b, want) {
			t.Errorf("%q is taken for a message of %q", b, body)
		}
	})
}

// pair returns two ends of a stream.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// FuzzRequest takes any bytes for a request. What is accepted means the same once
// more.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"method":"exec","spec":{"exec_id":"a"},"process":{"argv":["true"]}}`))
	f.Add([]byte(`{"method":"stdin","exec":"a","offset":1,"data":"eA==","end":true,"wait_ms":5}`))
	f.Add([]byte(`{"method":"x"} `))
	f.Add([]byte(`{"method":"x"}{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRequest(b)
		if err != nil {
			return
		}
		again, err := decodeRequest(marshal(r))
		if err != nil || !bytes.Equal(marshal(again), marshal(r)) {
			t.Errorf("%q: %v", b, err)
		}
	})
}

// A message with descriptors brings them, and one that has other than it says does
// not.
func TestDescriptorsOfAMessage(t *testing.T) {
	here, there := pair(t)
	defer here.Close()
	defer there.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := send(here, []byte("{}"), []*os.File{null, null}); err != nil {
		t.Fatal(err)
	}
	body, files, err := receive(there)
	if err != nil || string(body) != "{}" || len(files) != 2 {
		t.Fatalf("%q, %d files, %v", body, len(files), err)
	}
	fdpass.Close(files)
	if _, _, err := here.WriteMsgUnix(append(header{2, 2}.encode(), "{}"...), unix.UnixRights(int(null.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	if _, files, err := receive(there); err == nil || len(files) > 0 {
		t.Errorf("%d files, %v", len(files), err)
	}
}

// Every error that callers branch on comes through, and any other is one of the
// runtime.
func TestErrorsOnTheWire(t *testing.T) {
	for _, c := range codes {
		var a answer
		if err := json.Unmarshal(marshal(refuse(c.err)), &a); err != nil {
			t.Fatal(err)
		}
		err := a.error()
		if errors.Is(c.err, session.ErrBusy) || errors.Is(c.err, errSessions) { // callers are told to come again
			if !errors.Is(err, sandbox.ErrRate) {
				t.Errorf("%v became %v", c.err, err)
			}
			continue
		}
		if !isOne(err, c.err) {
			t.Errorf("%v became %v", c.err, err)
		}
	}
	if err := refuse(os.ErrClosed).error(); !isOne(err, sandbox.ErrRuntime) {
		t.Errorf("another error became %v", err)
	}
	if err := (answer{Code: "of tomorrow"}).error(); !isOne(err, sandbox.ErrRuntime) {
		t.Errorf("an error of tomorrow became %v", err)
	}
}

func isOne(err, want error) bool {
	n := 0
	for _, c := range codes {
		if errors.Is(err, c.err) {
			n++
		}
	}
	return n == 1 && errors.Is(err, want)
}
