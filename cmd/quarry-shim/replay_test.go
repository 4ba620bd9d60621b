package main_test

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"quarry/nbd/attach"
)

// wantAll collects the results of readers that got what they asked for.
func (r *rig) wantAll(results <-chan error, readers int) {
	r.t.Helper()
	timeout := time.After(patience)
	for range readers {
		select {
		case err := <-results:
			if err != nil {
				r.t.Error(err)
			}
		case <-timeout:
			r.t.Fatal("a reader hangs")
		}
	}
}

// wantNone fails when a reader has got anything.
func (r *rig) wantNone(results <-chan error) {
	r.t.Helper()
	select {
	case err := <-results:
		r.t.Errorf("a read without a reader ended with %v, want it to wait", err)
	default:
	}
}

func (r *rig) counts() attach.CountsValue {
	r.t.Helper()
	v, err := attach.ReadCounts(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

// TestReadsOutliveTheirReader loses the reader with reads under way: each is
// answered by the next one.
func TestReadsOutliveTheirReader(t *testing.T) {
	for name, signal := range map[string]os.Signal{
		"killed":        syscall.SIGKILL,
		"told to leave": syscall.SIGTERM, // it must not answer what the next one can
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.startShim()
			const readers = 10
			results := r.readDuring(readers)
			r.reader.Process.Signal(signal)
			r.reader.Wait()
			r.unstall()
			late := make(chan error, 1) // asks while there is no reader
			go func() { late <- r.compareFile("d4/f99") }()
			time.Sleep(50 * time.Millisecond)
			r.wantNone(results)
			r.wantNone(late)
			r.startReader(r.image)
			r.wantAll(results, readers)
			r.wantAll(late, 1)
			r.compareTree()
			if got, want := r.counts(), (attach.CountsValue{Readers: 1}); got != want {
				t.Errorf("counts are %+v, want %+v", got, want)
			}
		})
	}
}

// TestReaderWithAnotherImageIsNotUsed brings the right reader back afterwards: the
// kernel may have been shown anything by then, so the mount stays closed.
func TestReaderWithAnotherImageIsNotUsed(t *testing.T) {
	r := newRig(t)
	r.startShim()
	const readers = 4
	results := r.readDuring(readers)
	r.killReader()
	r.unstall()
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	r.startReader(other)
	r.wantEIO(results, readers)
	r.killReader()
	r.startReader(r.image)
	if err := r.compareFile("d4/f99"); !errors.Is(err, syscall.EIO) {
		t.Errorf("read after a reader of another image: got %v, want EIO", err)
	}
	if got := r.counts(); got.FailedReads == 0 || got.Readers != 0 {
		t.Errorf("counts are %+v, want failed reads and no new reader", got)
	}
}

// TestErrorOfALiveReaderIsAnAnswer is EIO at once, and counted.
func TestErrorOfALiveReaderIsAnAnswer(t *testing.T) {
	r := newRig(t)
	r.startShim()
	if err := r.compareFile("d4/f99"); err != nil {
		t.Fatal(err)
	}
	if got := r.counts(); got != (attach.CountsValue{}) {
		t.Errorf("counts are %+v before any error", got)
	}
	if err := os.WriteFile(r.stall+".fail", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.compareFile("d4/f99"); !errors.Is(err, syscall.EIO) {
		t.Errorf("got %v, want EIO", err)
	}
	if got := r.counts(); got.FailedReads == 0 || got.Readers != 0 {
		t.Errorf("counts are %+v, want failed reads and the same reader", got)
	}
	os.Remove(r.stall + ".fail")
	r.compareTree()
}

// TestReaderGoneForGoodMeansEIO reads without a reader, and from one that is
// stopped: it accepts connections and never answers.
func TestReaderGoneForGoodMeansEIO(t *testing.T) {
	for name, lose := range map[string]func(*rig){
		"killed":  (*rig).killReader,
		"stopped": func(r *rig) { stop(r.t, r.reader.Process.Pid) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.startShim("--deadline", "3s") // which the mount's own reads have to keep
			lose(r)
			const readers = 20
			results := make(chan error, readers)
			for range readers {
				go func() { results <- r.compareFile("d4/f99") }() // ends at the deadline
			}
			r.wantEIO(results, readers)
			if r.counts().FailedReads == 0 {
				t.Error("no failed read is counted")
			}
			if err := syscall.Unmount(r.path(""), 0); err != nil {
				t.Errorf("umount: %v", err)
			}
			if err := r.waitShim(); err != nil {
				t.Errorf("shim ended with %v", err)
			}
			if left := r.leftovers(); left != "" {
				t.Errorf("left after umount:\n%s", left)
			}
		})
	}
}

// TestDeadlineIsFromTheFirstReceipt gives a read a new reader, which does not
// answer either, again and again: that must not give it new time.
func TestDeadlineIsFromTheFirstReceipt(t *testing.T) {
	r := newRig(t)
	r.startShim("--deadline", "5s") // which the mount's own reads have to keep
	results := r.readDuring(1)
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		select {
		case err := <-results:
			if !errors.Is(err, syscall.EIO) {
				t.Errorf("got %v, want EIO", err)
			}
			if r.counts().Readers == 0 {
				t.Error("no other reader was asked")
			}
			return
		default:
		}
		r.killReader()
		r.startReader(r.image)
	}
	t.Error("a read that is sent again and again never ends")
}

// TestReplyThatIsCutIsNoReply reads through a relay that ends each connection
// after some bytes: within a header, within a payload, between two replies.
func TestReplyThatIsCutIsNoReply(t *testing.T) {
	r := newRig(t)
	front := &cutter{path: filepath.Join(t.TempDir(), "f"), back: r.socket}
	front.start(t)
	r.startShim("--socket", front.path)
	front.cut(true)
	for range 3 {
		r.compareTree()
	}
	front.cut(false)
	if got := r.counts(); got.FailedReads != 0 || got.Readers < 20 {
		t.Errorf("counts are %+v, want no failed reads and many readers", got)
	}
}

// cutter relays connections and cuts them.
type cutter struct {
	path, back string

	mu      sync.Mutex // guards what follows
	cutting bool
	rnd     *rand.Rand
	open    map[net.Conn]struct{}
}

func (c *cutter) start(t *testing.T) {
	l, err := net.Listen("unix", c.path)
	if err != nil {
		t.Fatal(err)
	}
	c.rnd, c.open = rand.New(rand.NewPCG(1, 2)), map[net.Conn]struct{}{}
	var work sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		c.cut(false)
		work.Wait()
	})
	work.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() { c.relay(conn) })
		}
	})
}

// cut begins or ends the cutting, and cuts what is open.
func (c *cutter) cut(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cutting = on
	for conn := range c.open {
		conn.Close()
	}
}

func (c *cutter) relay(conn net.Conn) {
	defer conn.Close()
	back, err := net.Dial("unix", c.back)
	if err != nil {
		return
	}
	defer back.Close()
	c.mu.Lock()
	c.open[conn], c.open[back] = struct{}{}, struct{}{}
	limit := int64(1) << 40
	if c.cutting {
		// Behind the handshake, and so large that a file of 120 KiB needs some.
		limit = 400 + c.rnd.Int64N(300<<10)
	}
	c.mu.Unlock()
	go func() { // ends with back
		io.Copy(back, conn)
		back.Close()
	}()
	io.CopyN(conn, back, limit)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, conn)
	delete(c.open, back)
}
