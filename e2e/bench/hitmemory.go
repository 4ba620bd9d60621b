package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"quarry/e2e/lab"
)

// maxTwice is how much of what was read may be in memory a second time, in the
// caches of device and file below the file system.
const maxTwice = 0.1

// memoryTable reads a file through every way to attach and says who holds how
// much of it.
func (h *hits) memoryTable(ctx context.Context) error {
	pids, err := lab.Find("reader", "--worker-dir", h.worker)
	if err != nil || len(pids) != 1 {
		return fmt.Errorf("%d readers, want 1 (%w)", len(pids), err)
	}
	for _, t := range h.targets {
		if !t.reader {
			continue
		}
		if err := forgetFiles(filepath.Join(h.worker, "cache")); err != nil {
			return err
		}
		if _, err := t.through(diskFile, diskBytes); err != nil {
			return err
		}
		file, err := residentBytes(filepath.Join(t.root, diskFile))
		if err != nil {
			return err
		}
		below, err := below(t)
		if err != nil {
			return err
		}
		cached, err := residentBytes(filepath.Join(h.worker, "cache"))
		if err != nil {
			return err
		}
		held, err := lab.ReaderMetric(ctx, h.worker, "quarry_reader_memory_bytes", "")
		if err != nil {
			return err
		}
		mode := strings.TrimSuffix(t.name, readerName)
		h.b.figure("memory after a read of 64 MiB, "+mode, fmt.Sprintf("page cache: file %.1f, device and image file %.1f, cache disk %.1f MiB; reader's chunks %.1f, its RSS %.1f; shim's own %.1f",
			mib(file), mib(below), mib(cached), held/(1<<20), mib(anonymous(pids[0])), mib(anonymous(t.shim.PID()))))
		h.b.atMost("memory, "+mode+": pages held below the file system ÷ read", float64(below)/diskBytes, maxTwice, "×")
	}
	return nil
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// below is what the page cache holds of a shim's block device and of the file that
// it serves.
func below(t *target) (n int64, err error) {
	raw, err := os.ReadFile(filepath.Join(t.shim.Dir, "shim.json"))
	if err != nil {
		return 0, err
	}
	files := []string{filepath.Join(t.shim.Dir, "fuse", "image")}
	if _, after, ok := strings.Cut(string(raw), `"/dev/`); ok {
		name, _, _ := strings.Cut(after, `"`)
		files = append(files, "/dev/"+name)
	}
	for _, path := range files {
		if _, err := os.Stat(path); err != nil {
			continue // this way to attach has none
		}
		k, err := residentBytes(path)
		if err != nil {
			return 0, err
		}
		n += k
	}
	return n, nil
}

// residentBytes is how much of a file, or of those below a folder, is in the page
// cache.
func residentBytes(root string) (n int64, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		pages, err := lab.Resident(path)
		for _, there := range pages {
			if there {
				n += int64(os.Getpagesize())
			}
		}
		return err
	})
	return n, err
}

// anonymous is what a process holds in memory of its own.
func anonymous(pid int) (n int64) {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(raw)) {
		var kib int64
		if k, _ := fmt.Sscanf(line, "RssAnon: %d kB", &kib); k == 1 {
			n = kib << 10
		}
	}
	return n
}
