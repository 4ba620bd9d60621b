//go:build vm

package attach_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/nbd/attach"
)

// The tests with the build tag vm are of the kernel's NBD client, which kernels
// that run this test suite may lack: e2e/vm builds them and runs them in guests.

// modes are those that eachMode tests.
var modes = []attach.Mode{attach.ModeNBD}

// The test program is also the process that attaches an image and is killed.
const (
	envAttachDir   = "QUARRY_TEST_ATTACH_DIR"
	envAttachImage = "QUARRY_TEST_ATTACH_IMAGE"
	envAttachStall = "QUARRY_TEST_ATTACH_STALL" // reads wait while this file is there
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envAttachDir); dir != "" {
		if err := attachAndWait(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func attachAndWait(dir string) error {
	image, err := os.ReadFile(os.Getenv(envAttachImage))
	if err != nil {
		return err
	}
	src := &memory{image: image}
	stallFile := os.Getenv(envAttachStall)
	stall := func(ctx context.Context, _ int64) error {
		for {
			if _, err := os.Stat(stallFile); err != nil {
				return nil
			}
			os.WriteFile(stallFile+".reached", nil, 0o600)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	src.stall.Store(&stall)
	a, err := attach.Attach(context.Background(), attach.Config{Mode: attach.ModeNBD, Dir: dir, Source: src, ReadAhead: -1})
	if err != nil {
		return err
	}
	fmt.Println(a.Device())
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, a.Detach(context.Background()))
}

// attacher is a process that attaches an image.
type attacher struct {
	t      *testing.T
	cmd    *exec.Cmd
	dir    string
	stall  string
	device string
	stderr bytes.Buffer
}

// startAttacher starts one; with wait, it is attached when this returns.
func startAttacher(t *testing.T, image []byte, stalled, wait bool) *attacher {
	t.Helper()
	base := t.TempDir()
	p := &attacher{t: t, dir: filepath.Join(base, "m"), stall: filepath.Join(base, "stall")}
	path := filepath.Join(base, "image")
	if err := errors.Join(os.WriteFile(path, image, 0o600), os.Mkdir(p.dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if stalled {
		p.startStall()
	}
	p.cmd = exec.CommandContext(testContext(t), os.Args[0])
	p.cmd.Env = append(os.Environ(), envAttachDir+"="+p.dir, envAttachImage+"="+path, envAttachStall+"="+p.stall)
	p.cmd.Stderr = &p.stderr
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		p.kill()
		p.sweep()
		p.cmd.Wait()
	})
	if wait {
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			p.cmd.Wait()
			t.Fatalf("attacher said %q, %v:\n%s", line, err, p.stderr.Bytes())
		}
		p.device = strings.TrimSpace(line)
	}
	return p
}

func (p *attacher) startStall() {
	if err := os.WriteFile(p.stall, nil, 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// awaitStalled waits until a read is held back.
func (p *attacher) awaitStalled() {
	p.t.Helper()
	waitFor(p.t, func() bool {
		_, err := os.Stat(p.stall + ".reached")
		return err == nil
	})
}

func (p *attacher) kill() { p.cmd.Process.Kill() }

func (p *attacher) sweep() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := attach.Sweep(ctx, p.dir)
	for errors.Is(err, attach.ErrInUse) && ctx.Err() == nil { // until the kernel has ended it
		time.Sleep(5 * time.Millisecond)
		err = attach.Sweep(ctx, p.dir)
	}
	if err != nil {
		p.t.Errorf("Sweep: %v", err)
	}
	if left := leftovers(p.t, p.dir); left != "" {
		p.t.Errorf("left after Sweep:\n%s", left)
	}
}

// readDevice reads a block of the device past the page cache and compares it.
func readDevice(device string, off int64, image []byte) error {
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return readBlock(fd, off, image)
}

func isFree(t *testing.T, device string) bool {
	t.Helper()
	_, err := os.Stat("/sys/block/" + filepath.Base(device) + "/pid")
	return errors.Is(err, os.ErrNotExist)
}

// TestKilledProcessOfNBD kills a process with reads under way: they wait until
// the folder is swept, which is at once, and another image's mount goes on. Then
// the device serves another image, and nothing of the first is seen there.
func TestKilledProcessOfNBD(t *testing.T) {
	image, _ := buildImage(t, 20)
	other, want := buildImage(t, 60)
	living := attachTo(t, attach.Config{Mode: attach.ModeNBD, Source: &memory{image: other}})
	p := startAttacher(t, image, false, true)
	if err := readDevice(p.device, 0, image); err != nil {
		t.Fatal(err)
	}
	p.startStall()
	const readers = 20
	results := make(chan error, readers)
	for i := range readers {
		go func() { results <- readDevice(p.device, int64(i+1)*4096, image) }() // ends with the sweep
	}
	p.awaitStalled()
	p.kill()
	p.cmd.Wait()
	p.sweep()
	for range readers {
		if err := <-results; !errors.Is(err, syscall.EIO) {
			t.Errorf("read of a killed process's device: %v, want EIO", err)
		}
	}
	waitFor(t, func() bool { return isFree(t, p.device) })
	compareTree(t, living.Root(), want)

	again := attachTo(t, attach.Config{Mode: attach.ModeNBD, Source: &memory{image: other}})
	if again.Device() != p.device {
		t.Errorf("the next device is %s, want %s: the kernel takes the first that is free", again.Device(), p.device)
	}
	for off := int64(0); off < int64(len(other)); off += 4096 {
		fd, err := unix.Open(again.Device(), unix.O_RDONLY|unix.O_CLOEXEC, 0) // through the page cache
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 4096)
		n, err := unix.Pread(fd, p, off)
		unix.Close(fd)
		if err != nil || n != 4096 || !bytes.Equal(p, other[off:off+4096]) {
			t.Fatalf("block at %d of the device that was used before: %v, or other bytes than the image's", off, err)
		}
	}
	compareTree(t, again.Root(), want)
}

// TestKilledWhileItMountsNBD kills a process whose mount(2) waits for its own
// answer. Its thread waits on until the sweep, and keeps nothing open.
func TestKilledWhileItMountsNBD(t *testing.T) {
	image, _ := buildImage(t, 20)
	for _, end := range []struct {
		name string
		how  func(p *attacher)
	}{
		{"swept", func(p *attacher) { p.sweep() }},
		{"ended", func(p *attacher) {
			if err := attach.End(testContext(t), p.dir); err != nil {
				t.Errorf("End: %v", err)
			}
		}},
	} {
		t.Run(end.name, func(t *testing.T) {
			p := startAttacher(t, image, true, false)
			p.awaitStalled()
			p.kill()
			end.how(p)
			ended := make(chan error, 1)
			go func() { ended <- p.cmd.Wait() }() // ends with the process
			select {
			case <-ended:
			case <-time.After(patience):
				t.Fatal("the killed process does not end")
			}
			if left := leftovers(t, p.dir); left != "" {
				t.Errorf("left:\n%s", left)
			}
		})
	}
}

// TestNBDStorm attaches and detaches many images at once, again and again, while
// others do. Each must see its own bytes only, first and last block and the
// files, and leave nothing.
func TestNBDStorm(t *testing.T) {
	const devices, rounds = 9, 12
	var images [devices][]byte
	var want [devices]map[string][]byte
	for i := range devices {
		images[i], want[i] = buildImage(t, 3+i)
	}
	base := t.TempDir()
	started := time.Now()
	var all sync.WaitGroup
	for i := range devices {
		all.Go(func() {
			for round := range rounds {
				n := (i + round) % devices // devices see every image
				if err := stormOnce(filepath.Join(base, fmt.Sprint(i)), images[n], want[n]); err != nil {
					t.Errorf("attacher %d in round %d: %v", i, round, err)
					return
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d attaches and detaches, %d at once, in %v", devices*rounds, devices, time.Since(started))
	if left := leftovers(t, base); left != "" {
		t.Errorf("left:\n%s", left)
	}
}

func stormOnce(dir string, image []byte, want map[string][]byte) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	a, err := attach.Attach(ctx, attach.Config{Mode: attach.ModeNBD, Dir: dir, Source: &memory{image: image}})
	if err != nil {
		return err
	}
	device := a.Device()
	defer func() { err = errors.Join(err, a.Detach(ctx)) }()
	for _, off := range []int64{0, int64(len(image)) - 4096} {
		if err := readDevice(device, off, image); err != nil {
			return fmt.Errorf("block at %d: %w", off, err)
		}
	}
	for name, content := range want {
		got, err := os.ReadFile(filepath.Join(a.Root(), name))
		if err != nil || !bytes.Equal(got, content) {
			return fmt.Errorf("%s: %w, or other bytes than the image's", name, err)
		}
		break
	}
	return nil
}

// TestNBDOfSeveralProcesses starts attachers at the same moment: none may get
// another's device.
func TestNBDOfSeveralProcesses(t *testing.T) {
	const processes = 4
	var images [processes][]byte
	var ps [processes]*attacher
	for i := range processes {
		images[i], _ = buildImage(t, 3+i)
		ps[i] = startAttacher(t, images[i], true, false)
	}
	for _, p := range ps { // they all mount now
		p.awaitStalled()
		os.Remove(p.stall)
	}
	for i, p := range ps {
		root := filepath.Join(p.dir, "root")
		waitFor(t, func() bool {
			var st unix.Statfs_t
			return unix.Statfs(root, &st) == nil && st.Type == 0xe0f5e1e2 // EROFS
		})
		devices, _ := filepath.Glob("/sys/block/nbd*/backend")
		found := 0
		for _, d := range devices {
			if b, err := os.ReadFile(d); err == nil && strings.HasSuffix(string(b), " "+p.dir+"\n") {
				found++
				if err := readDevice("/dev/"+filepath.Base(filepath.Dir(d)), 1024&^4095, images[i]); err != nil {
					t.Errorf("attacher %d: %v", i, err)
				}
			}
		}
		if found != 1 {
			t.Errorf("attacher %d has %d devices, want 1", i, found)
		}
	}
}

// TestNBDDisconnectedByAnother has the device taken away: the rest is EIO, and
// the attachment notices.
func TestNBDDisconnectedByAnother(t *testing.T) {
	image, _ := buildImage(t, 20)
	a := attachTo(t, attach.Config{Mode: attach.ModeNBD, Source: &memory{image: image}, ReadAhead: -1})
	fd, err := unix.Open(a.Device(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	const nbdDisconnectIoctl = 0xab08 // NBD_DISCONNECT
	_, err = unix.IoctlRetInt(fd, nbdDisconnectIoctl)
	unix.Close(fd)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-a.Gone():
	case <-time.After(patience):
		t.Error("Gone was not closed")
	}
	if err := readDevice(a.Device(), 4096, image); !errors.Is(err, syscall.EIO) {
		t.Errorf("read: %v, want EIO", err)
	}
}

// TestNBDInTwoParts attaches bootstrap and data as kernels before Linux 6.4 need.
func TestNBDInTwoParts(t *testing.T) {
	base := t.TempDir()
	content := bytes.Repeat([]byte("0123456789abcde\n"), 4096)
	src, boot, data := filepath.Join(base, "src"), filepath.Join(base, "boot"), filepath.Join(base, "data")
	err := errors.Join(os.Mkdir(src, 0o755), os.WriteFile(filepath.Join(src, "f"), content, 0o644))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(need.Tool(t, "mkfs.erofs"), "--quiet", "--chunksize=4096", "--blobdev="+data, boot, src).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v\n%s", err, out)
	}
	both, err := os.ReadFile(boot)
	if err != nil {
		t.Fatal(err)
	}
	both = padded(both)
	dataOff := int64(len(both))
	blob, err := os.ReadFile(data)
	if err != nil {
		t.Fatal(err)
	}
	a := attachTo(t, attach.Config{Mode: attach.ModeNBD, Source: &memory{image: append(both, padded(blob)...)}, DataOff: dataOff, Split: true})
	if got, err := os.ReadFile(filepath.Join(a.Root(), "f")); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the file: %v, or other bytes than it was made of", err)
	}
}

// padded fills up to whole blocks.
func padded(b []byte) []byte { return append(b, make([]byte, -len(b)&4095)...) }

func TestNBDQueueIsAsAsked(t *testing.T) {
	image, _ := buildImage(t, 20)
	a := attachTo(t, attach.Config{Mode: attach.ModeNBD, Source: &memory{image: image}, ReadAhead: 64})
	for name, want := range map[string]string{
		"ro": "1", "size": fmt.Sprint(len(image) / 512), "queue/logical_block_size": "4096",
		"queue/max_sectors_kb": "256", "queue/read_ahead_kb": "64",
	} {
		got, err := os.ReadFile("/sys/block/" + filepath.Base(a.Device()) + "/" + name)
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s is %q, %v, want %s", name, got, err, want)
		}
	}
	fd, err := unix.Open(a.Device(), unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Pwrite(fd, make([]byte, 4096), 0)
		unix.Close(fd)
	}
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		t.Errorf("write: %v, want a refusal", err)
	}
}

// TestWithoutNBD shows what the mode says and leaves where the kernel has none.
func TestWithoutNBD(t *testing.T) {
	if got := attach.ModeAuto.Used(); got != attach.ModeFUSE {
		t.Errorf("auto means %s, want fuse", got)
	}
	dir := filepath.Join(t.TempDir(), "m")
	_, err := attach.Attach(testContext(t), attach.Config{Mode: attach.ModeNBD, Dir: dir, Source: &memory{image: make([]byte, 4096)}})
	if !errors.Is(err, attach.ErrNoNBD) || !strings.Contains(err.Error(), "modprobe nbd") || !strings.Contains(err.Error(), "--attach fuse") {
		t.Errorf("Attach: %v, want one that names modprobe nbd and --attach fuse", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "lock" {
		t.Errorf("folder holds %v (%v), want the lock alone", entries, err)
	}
}
