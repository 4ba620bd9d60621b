package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"quarry/e2e/lab"
)

const (
	hitImage = "bench/hits"
	// memoryFile fits in a reader's memory beside what else is there; diskFile does
	// not stay there once the kernel has had it.
	memoryFile, memoryBytes = "memory", 16 << 20
	diskFile, diskBytes     = "disk", 64 << 20
	// hitReads are made of one file in one round.
	hitReads = 500
	// What a hit may add to the same read of the same device on a plain loop device,
	// the median of 4 KiB reads: in the reader's memory, and on its cache disk where
	// neither disk has it in the page cache.
	maxMemoryMicros = 60
	maxDiskMicros   = 150
	// minSequential is how fast a reader must be, compared with a file server
	// behind the same shim.
	minSequential = 0.5
	// minHits of the reads that are measured must be hits of the tier that they
	// are meant for: an eighth of diskFile stays in the reader's memory.
	minHits = 0.8
)

// target is a mounted copy of the files to read.
type target struct {
	name   string
	root   string       // "" for what is no mount
	shim   *lab.Shim    // nil for the local one
	reader bool         // it is the reader that serves it
	stop   func() error // ends it
	memory []float64    // p50 of each round, in µs
	disk   []float64    // the same
	seq    []float64    // of each round, in MB/s
}

// hits is what the measurements share.
type hits struct {
	b       *bench
	data    string // folder of the store
	worker  string // folder
	device  string // file, a copy of the export
	targets []*target
}

// measureHits reads what the reader has in memory and on disk, through every way
// to attach that this kernel has, beside a local device and another server behind
// the same shim.
func measureHits(ctx context.Context, b *bench) (err error) {
	source, err := generated(b.cache, "hits-16-64", func(t *tar.Writer) error {
		return errors.Join(writeRandom(t, memoryFile, memoryBytes), writeRandom(t, diskFile, diskBytes))
	})
	if err != nil {
		return err
	}
	h := &hits{b: b, data: b.lab.Path("hits"), worker: b.lab.Path("hits.w"), device: b.lab.Path("hits.img")}
	if _, err := b.lab.Convert(ctx, h.data, "oci:"+source.dir, hitImage); err != nil {
		return err
	}
	// By a worker of its own: what it has read is not to be in this one's caches.
	if err := h.mounted(ctx, b.lab.Path("hits.copy"), func(e lab.Export) error { return e.Copy(ctx, h.device) }); err != nil {
		return err
	}
	return h.mounted(ctx, h.worker, func(e lab.Export) error { return h.through(ctx, e) })
}

// mounted calls fn while a worker has the image mounted, and a reader with it.
func (h *hits) mounted(ctx context.Context, worker string, fn func(lab.Export) error) (err error) {
	mount := worker + ".m"
	if err := os.Mkdir(mount, 0o755); err != nil {
		return err
	}
	if _, err := h.b.lab.Quarry(ctx, "mount", "--data", h.data, "--worker-dir", worker, hitImage, mount); err != nil {
		return err
	}
	defer func() {
		_, umountErr := h.b.lab.Quarry(context.WithoutCancel(ctx), "umount", "--worker-dir", worker, mount)
		err = errors.Join(err, umountErr)
	}()
	e, err := lab.ReaderExport(worker)
	if err != nil {
		return err
	}
	return fn(e)
}

// through mounts the export in every way and measures.
func (h *hits) through(ctx context.Context, e lab.Export) (err error) {
	err = h.mountAll(ctx, e)
	defer func() {
		for _, t := range slices.Backward(h.targets) {
			err = errors.Join(err, t.stop())
		}
	}()
	if err != nil {
		return err
	}
	if err := h.measure(ctx, hitRounds(h.b.all)); err != nil {
		return err
	}
	h.report()
	return h.memoryTable(ctx)
}

func hitRounds(all bool) int {
	if all {
		return 15
	}
	return 7
}

// mountAll mounts the export, and the copy of it, in every way.
func (h *hits) mountAll(ctx context.Context, e lab.Export) error {
	dir := h.b.lab.Path("hits.local")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "mount", "-t", "erofs", "-o", "loop,ro", h.device, dir).CombinedOutput(); err != nil {
		return fmt.Errorf("mount %s: %w: %s", h.device, err, out)
	}
	h.targets = append(h.targets, &target{name: localName, root: dir, stop: func() error { return unix.Unmount(dir, 0) }})
	served := lab.Export{Socket: h.b.lab.Path("nbdkit.sock"), Name: e.Name, Size: e.Size, DataOff: e.DataOff}
	kit, err := h.b.lab.Nbdkit(ctx, served.Socket, "file", h.device)
	if err != nil {
		return err
	}
	h.targets = append(h.targets, &target{name: "nbdkit", stop: kit.Stop})
	for _, mode := range attachModes() {
		for _, from := range []struct {
			name   string
			export lab.Export
		}{{readerName, e}, {serverName, served}} {
			shim, err := h.b.lab.Shim(ctx, from.export, "--attach", mode)
			if err != nil {
				return fmt.Errorf("attach with %s: %w", mode, err)
			}
			h.targets = append(h.targets, &target{name: mode + from.name, root: shim.Root(), shim: shim, reader: from.name == readerName, stop: shim.Stop})
		}
	}
	return nil
}

const (
	localName  = "local loop device"
	readerName = ", reader"
	serverName = ", file server"
)

// attachModes are those of this kernel.
func attachModes() []string {
	modes := []string{"fuse"}
	var u unix.Utsname
	var major, minor int
	if unix.Uname(&u) == nil {
		fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	}
	if major > 6 || major == 6 && minor >= 12 {
		modes = append(modes, "file")
	}
	if _, err := os.Stat("/sys/block/nbd0"); err == nil {
		modes = append(modes, "nbd")
	}
	return modes
}

func (h *hits) report() {
	b, byName := h.b, map[string]*target{}
	for _, t := range h.targets {
		byName[t.name] = t
	}
	local := byName[localName]
	for _, t := range h.targets {
		if t.root != "" {
			b.figure("4 KiB p50, "+t.name, fmt.Sprintf("in memory %.0f µs (added %.0f), on disk %.0f µs (added %.0f); sequential %.0f MB/s",
				median(t.memory), median(t.memory)-median(local.memory), median(t.disk), median(t.disk)-median(local.disk), median(t.seq)))
		}
	}
	for _, mode := range attachModes() {
		reader, other := byName[mode+readerName], byName[mode+serverName]
		ratio := median(reader.seq) / median(other.seq)
		if mode == "file" { // only a comparison
			b.figure("sequential, "+mode+": reader ÷ file server", fmt.Sprintf("%.2f", ratio))
			continue
		}
		b.atMost("hit in memory, "+mode+": added at 4 KiB p50", median(reader.memory)-median(local.memory), maxMemoryMicros, "µs")
		b.atMost("hit on the cache disk, "+mode+": added at 4 KiB p50", median(reader.disk)-median(local.disk), maxDiskMicros, "µs")
		b.atLeast("sequential, "+mode+": reader ÷ file server", ratio, minSequential, "×")
	}
}

// writeRandom writes one file that does not compress, the same every time.
func writeRandom(t *tar.Writer, name string, size int64) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: time.Unix(1_700_000_000, 0), Size: size}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err := io.CopyN(t, rand.NewChaCha8([32]byte{byte(len(name))}), size)
	return err
}
