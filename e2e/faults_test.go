package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/e2e/lab"
)

// faults are the rows of the matrix. A read of a mount whose shim has died is
// EIO until it is mounted again; everything else heals by itself.
func faults() []fault {
	all := func(outcome string) [4]string { return [4]string{outcome, outcome, outcome, outcome} }
	lasting := [4]string{refused, eio, eio, eio}
	return []fault{
		{name: "reader killed", alive: true, strike: killOf("reader"), want: all(right)},
		{name: "shim killed", alive: true, strike: killShims, want: [4]string{right, remount, remount, failed}},
		{name: "keeper killed", alive: true, strike: killOf("keeper"), want: all(right)},
		{name: "store killed", strike: killStore, mend: startStore, lasts: true, shared: true, want: lasting},
		{name: "store restarted", shared: true, strike: restartStore, want: all(right)},
		{name: "store lies", strike: lie, mend: mendNet, lasts: true, want: lasting},
		{name: "store stalls", strike: stallNet, mend: mendNet, lasts: true, want: lasting},
		{name: "store stalls a while", strike: stallNet, mend: mendNet, soon: true, want: all(waits)},
		{name: "connections cut", strike: cutNet, mend: mendNet, lasts: true, want: lasting},
		{name: "cache disk: bits flipped", prime: true, again: true, strike: flipCache, want: all(right)},
		{name: "cache disk: full", small: true, strike: fillCache, want: all(right)},
		{name: "cache disk: removed", prime: true, again: true, strike: removeCache, want: all(right)},
		{name: "tag moved", shared: true, alive: true, moves: true, strike: moveTag, mend: moveBack, want: all(right)},
	}
}

// killOf kills the worker's background process of a kind. There may be a second
// for a moment, which finds the first and ends.
func killOf(kind string) func(*cell) error {
	return func(c *cell) error {
		pids, err := lab.Find(kind, "--worker-dir", c.worker)
		for range 1200 { // a minute
			if err != nil || len(pids) == 1 {
				break
			}
			time.Sleep(50 * time.Millisecond)
			pids, err = lab.Find(kind, "--worker-dir", c.worker)
		}
		if err != nil {
			return err
		}
		if len(pids) != 1 {
			return fmt.Errorf("%d processes are %s of %s, want 1", len(pids), kind, c.worker)
		}
		return syscall.Kill(pids[0], syscall.SIGKILL)
	}
}

func killShims(c *cell) error {
	states, err := filepath.Glob(filepath.Join(c.worker, "mounts", "*", "shim.json"))
	if err != nil || len(states) == 0 {
		return fmt.Errorf("no shim to kill (%w)", err)
	}
	for _, path := range states {
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var s struct{ PID int }
		if err := json.Unmarshal(raw, &s); err != nil {
			return err
		}
		if err := syscall.Kill(s.PID, syscall.SIGKILL); err != nil {
			return err
		}
	}
	return nil
}

func killStore(c *cell) error { return c.server.Kill() }

// startStore starts the store when it is dead.
func startStore(c *cell) error {
	if c.server.Alive() {
		return nil
	}
	s, err := c.Serve(context.WithoutCancel(c.t.Context()), c.data)
	if err != nil {
		return err
	}
	c.server = s
	c.net.Retarget(s.Addr())
	return nil
}

func restartStore(c *cell) error {
	if err := killStore(c); err != nil {
		return err
	}
	return startStore(c)
}

// lie flips a bit in everything longer than a header that comes from the store.
func lie(c *cell) error {
	const longerThanAHeader = 4 << 10
	c.net.Flip(longerThanAHeader)
	return nil
}

func stallNet(c *cell) error { c.net.Stall(); return nil }
func cutNet(c *cell) error   { c.net.Cut(); return nil }
func mendNet(c *cell) error  { c.net.Mend(); return nil }

// onDisk waits until the cache disk holds something and nothing is added to it.
func (c *cell) onDisk() error {
	last := int64(-1)
	for range 600 { // a minute
		now, err := sizeOf(filepath.Join(c.worker, "cache"))
		if err != nil {
			return err
		}
		if now > 0 && now == last {
			return nil
		}
		last = now
		time.Sleep(100 * time.Millisecond)
	}
	return errors.New("nothing comes to rest on the cache disk")
}

// cacheFiles calls fn for every file on the cache disk.
func cacheFiles(dir string, fn func(path string, size int64) error) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return fn(path, info.Size())
	})
}

// sizeOf adds up what files take on disk: some are longer than what is in them.
func sizeOf(dir string) (n int64, err error) {
	err = cacheFiles(dir, func(path string, _ int64) error {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		n += st.Blocks * 512
		return err
	})
	return n, err
}

// flipCache flips a bit in every 4 KiB of the cache disk, and makes the reader
// forget what it has in memory.
func flipCache(c *cell) error {
	err := cacheFiles(filepath.Join(c.worker, "cache"), func(path string, size int64) error {
		p, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		for off := 2048; off < len(p); off += 4096 {
			p[off] ^= 4
		}
		_, err = f.WriteAt(p, 0) // in place: the reader has it open
		return err
	})
	if err != nil {
		return err
	}
	return killReaders(c)
}

// killReaders is killOf for a reader that may have ended by itself.
func killReaders(c *cell) error {
	pids, err := lab.Find("reader", "--worker-dir", c.worker)
	for _, pid := range pids {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	return err
}

// fillCache leaves no room on the disk of the cache.
func fillCache(c *cell) error {
	dir := filepath.Join(c.worker, "cache")
	if !isMount(dir) {
		return errors.New("the cache is on no disk of its own")
	}
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		return err
	}
	defer f.Close()
	piece := make([]byte, 64<<10)
	for {
		if _, err := f.Write(piece); errors.Is(err, syscall.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func removeCache(c *cell) error {
	return errors.Join(os.RemoveAll(filepath.Join(c.worker, "cache")), killReaders(c))
}

func moveTag(c *cell) error {
	_, err := c.Convert(c.ctx, c.data, "oci:"+c.moved, matrixImage)
	return err
}

func moveBack(c *cell) error {
	_, err := c.Convert(c.ctx, c.data, "oci:"+c.image, matrixImage)
	return err
}
