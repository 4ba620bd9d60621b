package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/api/client"
	"quarry/internal/need"
	"quarry/internal/storm"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
)

// A disk that is full, by an upload that was never finished and by something else: the
// node says so, serves what it has, starts again after kill -9, and loses nothing.
func TestAFullDiskLosesNothing(t *testing.T) {
	need.Root(t)
	l := newLab(t)
	disk := l.Path("disk")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=320m,mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f := newFragile(t, l, filepath.Join(disk, "d"))
	names := []string{f.pushed()}

	// An upload does not get what the node needs to go on.
	upload := f.fillByUpload()
	converted, _ := f.make()
	if _, err := f.Convert(t.Context(), f.data, "oci:"+f.layouts[converted], converted); err != nil {
		t.Fatal(err)
	}
	names = append(names, converted)
	f.sound("beside an upload that fills the disk", names)

	// Whatever else takes the rest, the node says it, and reads go on.
	balloon := filepath.Join(disk, "balloon")
	fill(t, balloon)
	tag, im := f.make()
	err := f.push(t.Context(), tag, im)
	if err == nil || !strings.Contains(err.Error(), "DISK_FULL") {
		t.Fatalf("push to a full disk: %v", err)
	}
	f.same(names)

	if err := f.server.Kill(); err != nil {
		t.Fatal(err)
	}
	fill(t, balloon) // what the killed process gave back
	f.start()
	log, err := os.ReadFile(l.Path("serve.log"))
	if err != nil || !strings.Contains(string(log), "unfinished uploads were removed") {
		t.Errorf("the node does not say what it removed: %v: %s", err, log)
	}
	if resp, err := http.Get(f.server.URL + upload); err != nil || resp.StatusCode != http.StatusNotFound {
		t.Errorf("the upload: %v, %v", resp, err)
	}
	f.same(names)
	if err := os.Remove(balloon); err != nil {
		t.Fatal(err)
	}
	if err := f.push(t.Context(), tag, im); err != nil {
		t.Fatal(err)
	}
	if err := f.ready(t.Context(), tag); err != nil {
		t.Fatal(err)
	}
	names = append(names, tag)
	f.sound("with room again", names)
	f.same(names)
	if err := f.server.Stop(); err != nil {
		t.Fatal(err)
	}
}

// fillByUpload sends a blob without an end until the node refuses more, and returns
// where it is.
func (f *fragile) fillByUpload() (location string) {
	f.t.Helper()
	resp, err := http.Post(f.server.URL+"/v2/t/big/blobs/uploads/", "", nil)
	if err != nil || resp.StatusCode != http.StatusAccepted {
		f.t.Fatalf("begin upload: %v, %v", resp, err)
	}
	resp.Body.Close()
	location = resp.Header.Get("Location")
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodPatch, f.server.URL+location, io.LimitReader(zeros{}, 1<<30))
	if err != nil {
		f.t.Fatal(err)
	}
	if resp, err = http.DefaultClient.Do(req); err != nil {
		if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) { // answered before all was sent
			f.t.Fatal(err)
		}
		return location
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusInsufficientStorage {
		f.t.Fatalf("upload of a GiB: %s: %s", resp.Status, body)
	}
	return location
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// fill writes a file until its disk is full.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, size := range []int64{1 << 20, 4 << 10} {
		if _, err := io.CopyBuffer(struct{ io.Writer }{f}, io.LimitReader(zeros{}, 1<<30), make([]byte, size)); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("fill the disk: %v", err)
		}
	}
}

// A bucket that is away: the node says so and takes nothing; what it took before is
// converted once the bucket is back, without anybody doing anything.
func TestABucketThatGoesAndComesBack(t *testing.T) {
	f, stop, s3 := newRemote(t)
	names := []string{f.pushed()}
	tag, im := f.make()
	reached := stop.stopBehind(func(change string) bool { return change == "Put packs" })
	if err := f.push(t.Context(), tag, im); err != nil {
		t.Fatal(err)
	}
	<-reached // in mid-conversion
	names = append(names, tag)
	s3.Stop()
	stop.stopBehind(nil)
	refused, im := f.make()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.push(t.Context(), refused, im); err == nil {
			t.Error("a push is acknowledged while there is no bucket")
		}
	})
	wg.Go(func() {
		ref, err := image.ParseName(names[0])
		if err != nil {
			t.Error(err)
		}
		if _, err := f.local.Image(t.Context(), ref, image.HostPlatform()); err == nil || !strings.Contains(err.Error(), "connection refused") && !strings.Contains(err.Error(), "502") {
			t.Errorf("an image is asked for while there is no bucket: %v", err)
		}
	})
	wg.Wait()
	if err := s3.Start(); err != nil {
		t.Fatal(err)
	}
	if err := f.ready(t.Context(), tag); err != nil {
		t.Fatal(err)
	}
	f.sound("the bucket is back", names)
	f.same(names)
	if err := f.push(t.Context(), refused, im); err != nil {
		t.Fatal(err)
	}
}

const (
	// steady are the images that are read while gc runs, which it does again and again
	// until so many images came and went.
	steady   = 3
	passings = 12
)

// gc beside pushes and reads: images that come, share content with what goes and go
// themselves; every image that stays is read all the while, and every byte compared. A
// tag that is moved under a mount takes nothing from it.
func TestGCBesidePushesAndReads(t *testing.T) {
	need.Root(t)
	l := newLab(t)
	f := newFragile(t, l, l.Path("d"))
	var names []string
	for range steady {
		names = append(names, f.pushed())
	}
	mount := f.mountMoved()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var reads, pushes atomic.Int64
	for _, n := range names {
		wg.Go(func() { until(stop, func() { f.readAll(n); reads.Add(1) }) })
	}
	var making sync.Mutex // of f.files
	wg.Go(func() {
		until(stop, func() {
			making.Lock()
			tag, im := f.make()
			making.Unlock()
			err := f.push(t.Context(), tag, im)
			if err == nil {
				err = f.ready(t.Context(), tag)
			}
			if err != nil {
				t.Errorf("push %s: %v", tag, err)
				return
			}
			f.readAll(tag)
			f.remove([]string{tag})
			pushes.Add(1)
		})
	})
	collections := 0
	for ; pushes.Load() < passings && !t.Failed(); collections++ {
		if err := f.collect(t.Context(), "1h"); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d collections, %d pushes, %d images read", collections, pushes.Load(), reads.Load())
	f.sound("after gc", names)
	f.readMount(mount)
	if n, err := f.server.Metric(t.Context(), "quarry_packed_condemned_reads_total"); err != nil || n != 0 {
		log, _ := os.ReadFile(l.Path("serve.log"))
		t.Errorf("%v alarms, %v: %s", n, err, log)
	}
}

// until calls fn again and again until stop is closed, and once at least.
func until(stop <-chan struct{}, fn func()) {
	for {
		fn()
		select {
		case <-stop:
			return
		default:
		}
	}
}

// readAll reads every chunk of an image through the node; the client compares each with
// its digest.
func (f *fragile) readAll(tag string) {
	if err := f.tryReadAll(tag); err != nil {
		f.t.Errorf("read %s: %v", tag, err)
	}
}

func (f *fragile) tryReadAll(tag string) error {
	cl, err := client.New(client.Config{URL: f.server.URL})
	if err != nil {
		return err
	}
	defer cl.Close()
	trust, err := signer.LoadTrust(filepath.Join(f.data, "keys"))
	if err != nil {
		return err
	}
	ref, err := image.ParseName(tag)
	if err != nil {
		return err
	}
	doc, err := cl.Image(f.t.Context(), ref, image.HostPlatform())
	if err != nil {
		return err
	}
	payload, _, err := signer.Open(doc.Image, image.StatementType, trust)
	if err != nil {
		return err
	}
	st, err := image.DecodeStatement(payload)
	if err != nil {
		return err
	}
	boot, err := cl.Bootstrap(f.t.Context(), st.Bootstrap, st.BootstrapSize)
	if err != nil {
		return err
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		return err
	}
	var ds []chunk.Digest
	for i := range im.Blob.Chunks {
		ds = append(ds, im.Blob.Chunks[i].Digest)
	}
	return cl.GetBatch(f.t.Context(), ds, func(d chunk.Digest, _ []byte, err error) error {
		if err != nil {
			return fmt.Errorf("chunk %s: %w", d, err)
		}
		return nil
	})
}

// moved is a mount whose tag was moved to another image.
type moved struct {
	at      string
	files   map[string]string // of the image that it has
	readers *storm.Readers    // of one of them, all the while
}

// mountMoved mounts an image as a worker that knows the URL and the key, and moves its
// tag away. Of its files one is read all the while, the others were never read yet.
func (f *fragile) mountMoved() moved {
	f.t.Helper()
	const tag = "t/moved:latest"
	push := func(seed int) map[string]string {
		files := map[string]string{}
		for i, name := range []string{"early", "late", "last"} {
			files[name] = random(seed+i, 700_000)
		}
		im := f.makeOf(tag, files)
		err := f.push(f.t.Context(), tag, im)
		if err == nil {
			err = f.ready(f.t.Context(), tag)
		}
		if err != nil {
			f.t.Fatal(err)
		}
		return files
	}
	m := moved{at: f.Path("m"), files: push(10_000)}
	early := f.Path("early")
	for _, dir := range []string{m.at, early} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			f.t.Fatal(err)
		}
	}
	key := filepath.Join(f.data, "keys", "signing.pub")
	if _, err := f.Quarry(f.t.Context(), "mount", "--store", f.server.URL, "--trust", key, "--worker-dir", f.Path("w"), tag, m.at); err != nil {
		f.t.Fatal(err)
	}
	err := os.WriteFile(filepath.Join(early, "early"), []byte(m.files["early"]), 0o600)
	if err == nil {
		err = storm.Manifest(f.Path("manifest"), early, m.at)
	}
	if err == nil {
		m.readers, err = storm.Start(f.t.Context(), 1, f.Path("manifest"))
	}
	if err != nil {
		f.t.Fatal(err)
	}
	push(20_000)
	return m
}

// readMount ends the readers, reads what was never read, and unmounts.
func (f *fragile) readMount(m moved) {
	f.t.Helper()
	v, err := m.readers.End()
	if err != nil || v.Files == 0 || len(v.Failed) > 0 {
		f.t.Errorf("reads of the mount: %d files, %v, %v", v.Files, v.Failed, err)
	}
	for name, want := range m.files {
		if got, err := os.ReadFile(filepath.Join(m.at, name)); err != nil || string(got) != want {
			f.t.Errorf("%s of the image whose tag was moved: %d bytes, %v", name, len(got), err)
		}
	}
	if _, err := f.Quarry(f.t.Context(), "umount", "--worker-dir", f.Path("w"), m.at); err != nil {
		f.t.Error(err)
	}
}
