package e2e_test

import (
	"bufio"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"quarry/e2e/lab"
	"quarry/internal/need"
)

// rig is a device with known content, which nbdkit serves to a shim.
type rig struct {
	*lab.Lab
	t      *testing.T
	device string
	export lab.Export
	tree   knownTree
	server *lab.Process
	shim   *lab.Shim
}

func needRig(t *testing.T) *rig {
	t.Helper()
	need.Root(t)
	for _, tool := range []string{"nbdkit", "mkfs.erofs"} {
		need.Tool(t, tool)
	}
	l := newLab(t)
	r := &rig{Lab: l, t: t, device: l.Path("device")}
	t.Cleanup(r.end)
	r.tree, _ = writeKnown(t, l.Path("root"), 40, 1)
	if out, err := exec.Command("mkfs.erofs", "--quiet", r.device, l.Path("root")).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
	info, err := os.Stat(r.device)
	if err != nil {
		t.Fatal(err)
	}
	r.export = lab.Export{Socket: l.Path("nbdkit"), Name: "image", Size: info.Size()}
	return r
}

// end ends shim and server, of which either may be dead.
func (r *rig) end() {
	if r.shim != nil {
		if err := r.shim.Stop(); err != nil {
			r.t.Error(err)
		}
		if isMount(r.shim.Root()) {
			r.t.Error("the shim has left its mount")
		}
	}
	if r.server != nil {
		r.server.Stop()
	}
	r.shim, r.server = nil, nil
}

// serve starts nbdkit on the device, with filters and their parameters.
func (r *rig) serve(args ...string) {
	r.t.Helper()
	os.Remove(r.export.Socket)
	var filters, params []string
	for _, a := range args {
		if len(a) > 2 && a[:2] == "--" {
			filters = append(filters, a)
		} else {
			params = append(params, a)
		}
	}
	server, err := r.Nbdkit(context.Background(), r.export.Socket, append(append(filters, "file", r.device), params...)...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.server = server
}

func (r *rig) kill() {
	r.server.Kill()
	r.server = nil
}

func (r *rig) attach(flags ...string) {
	r.t.Helper()
	shim, err := r.Shim(context.Background(), r.export, flags...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.shim = shim
}

// want reads everything and compares what that came to.
func (r *rig) want(outcome string, each func(int)) {
	r.t.Helper()
	done := make(chan found, 1)
	go func() { done <- readKnown(r.shim.Root(), r.tree, each) }() // ends with its reads
	select {
	case f := <-done:
		if got, err := judge(f, false); got != outcome {
			r.t.Errorf("reads were %q (%v), want %q: %v", got, err, outcome, f)
		}
	case <-time.After(forever):
		r.t.Fatal("reads hang")
	}
}

// TestServersThatFailBehindAShim mounts what nbdkit serves while one of its fault
// filters is at work: every read has the right bytes, or is EIO.
func TestServersThatFailBehindAShim(t *testing.T) {
	r := needRig(t)
	for _, tc := range []struct {
		name  string
		args  []string // filters and their parameters
		flags []string // the shim's
		want  string
	}{
		{"no fault", nil, nil, right},
		{"reads are late", []string{"--filter=delay", "rdelay=20ms"}, nil, right},
		{"reads are later than the deadline", []string{"--filter=delay", "rdelay=10", "delay-open=0"}, []string{"--deadline", "500ms"}, eio},
		{"a slow server", []string{"--filter=rate", "rate=200M"}, nil, right},
		{"one request at a time", []string{"--filter=noparallel", "serialize=requests"}, nil, right},
		{"no second connection", []string{"--filter=multi-conn", "multi-conn-mode=disable"}, nil, right},
		{"short and unaligned reads are refused", []string{
			"--filter=blocksize-policy", "blocksize-error-policy=error", "blocksize-minimum=4096", "blocksize-preferred=4096", "blocksize-maximum=256k",
		}, nil, right},
		{"a server that tries again by itself", []string{
			"--filter=retry-request", "--filter=error", "retry-request-delay=1", "retry-request-retries=100", "error-pread-rate=2%",
		}, nil, right},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := r.in(t)
			defer r.end()
			if tc.want == eio { // the mount itself must get through
				r.serve()
				r.attach(append(tc.flags, "--read-ahead", "0")...)
				r.kill()
				r.serve(tc.args...)
			} else {
				r.serve(tc.args...)
				r.attach(tc.flags...)
			}
			r.want(tc.want, nil)
		})
	}
}

// TestServersThatFailForAWhileBehindAShim is the same for faults that come under
// reading, and may go.
func TestServersThatFailForAWhileBehindAShim(t *testing.T) {
	r := needRig(t)
	t.Run("reads fail for a while", func(t *testing.T) {
		r := r.in(t)
		defer r.end()
		trigger := r.Path("fail")
		r.serve("--filter=error", "error-pread-rate=40%", "error-file="+trigger)
		r.attach()
		if err := os.WriteFile(trigger, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		r.want(eio, nil)
		if err := os.Remove(trigger); err != nil {
			t.Fatal(err)
		}
		r.want(right, nil)
	})
	t.Run("the server stops and goes on", func(t *testing.T) {
		r := r.in(t)
		defer r.end()
		control := r.Path("pause")
		r.serve("--filter=pause", "pause-control="+control)
		r.attach()
		r.want(right, func(n int) {
			if n == strikeAfter {
				pause(t, control, 'p')
				time.AfterFunc(time.Second, func() { pause(t, control, 'r') })
			}
		})
	})
	t.Run("killed under reading, and started again", func(t *testing.T) {
		r := r.in(t)
		defer r.end()
		r.serve()
		r.attach()
		r.want(right, func(n int) {
			if n == strikeAfter || n == 3*strikeAfter {
				r.kill()
				r.serve()
			}
		})
	})
	t.Run("killed under reading, for good", func(t *testing.T) {
		r := r.in(t)
		defer r.end()
		r.serve()
		r.attach("--deadline", "1s")
		r.want(eio, func(n int) {
			if n == strikeAfter {
				r.kill()
			}
		})
	})
	t.Run("another device in its place", func(t *testing.T) {
		r := r.in(t)
		defer r.end()
		r.serve()
		r.attach("--deadline", "1s")
		r.kill()
		r.serve("--filter=truncate", "truncate=1M")
		r.want(eio, nil)
	})
}

// in is the rig in a part of the test.
func (r *rig) in(t *testing.T) *rig {
	part := *r
	part.t = t
	return &part
}

// pause tells nbdkit's pause filter to stop or to go on.
func pause(t *testing.T, control string, what byte) {
	c, err := net.Dial("unix", control)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	if _, err := c.Write([]byte{what}); err != nil {
		t.Error(err)
	}
	bufio.NewReader(c).ReadByte() // its answer
}

// TestShimRefusesAnotherSize is of a server that offers what the image is not.
func TestShimRefusesAnotherSize(t *testing.T) {
	r := needRig(t)
	r.serve("--filter=truncate", "truncate=1M")
	if shim, err := r.Shim(t.Context(), r.export); err == nil {
		shim.Stop()
		t.Error("the shim has mounted a device of another size")
	}
	left, _ := filepath.Glob(r.Path("shim*", "root", "*"))
	if len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
