package chunkindex

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	// commitRoom must be free on the disk for a change. Pebble cannot be told
	// of a full disk: it ends the process when it finds no room for a new log.
	// 32 MiB are the log of one memory table and the table file it becomes.
	commitRoom = 2 * memTableSize
	// openRoom must be free, beside what the logs' content takes as table files,
	// to open an index: a new log, the manifest and the options, each far below
	// 1 MiB. It is less than commitRoom so that a store on a nearly full disk can
	// still be read.
	openRoom = 2 << 20
	// fullPause is how long Pebble's writes wait on a full disk before they try
	// once more. Pebble repeats a failed flush at once and without end.
	fullPause = time.Second
)

// errVersion says that a newer, or far older, quarry wrote the index.
var errVersion = errors.New("index version")

// damagedSuffix is what the name of a folder gets that was moved aside.
const damagedSuffix = ".damaged"

// Open opens the index in a folder and locks it against other processes. A
// folder that is damaged so that it cannot be opened is renamed to
// <dir>.damaged, in the place of an earlier one, and an empty index is opened:
// it is derived data, and packed.Open fills it. A folder that another process
// holds, that may not be read or that does not fit on the disk is an error.
func Open(cfg Config) (*Index, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.FS == nil {
		cfg.FS = vfs.Default
	}
	if cfg.CacheSize == 0 {
		cfg.CacheSize = DefaultCacheSize
	}
	x, err := openFolder(cfg)
	var d *damage
	if !errors.As(err, &d) {
		return x, openError(cfg.Dir, err)
	}
	aside := cfg.Dir + damagedSuffix
	err = errors.Join(cfg.FS.RemoveAll(aside), cfg.FS.Rename(cfg.Dir, aside))
	if err := errors.Join(err, d.unlock()); err != nil {
		return nil, openError(cfg.Dir, fmt.Errorf("move the damaged index aside: %w; it is derived data, remove the folder and start again", err))
	}
	cfg.Log.Warn("chunk index is damaged, it is made anew from journal and packs", "dir", cfg.Dir, "moved_to", aside, "error", d.err)
	x, err = openFolder(cfg)
	if errors.As(err, &d) {
		err = errors.Join(d.err, d.unlock())
	}
	return x, openError(cfg.Dir, err)
}

func openError(dir string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errVersion):
		return fmt.Errorf("open chunk index %s: %w: use the quarry that wrote it, or remove the folder, it is derived data", dir, err)
	}
	return fmt.Errorf("open chunk index %s: %w", dir, err)
}

// damage is why a folder is no index, or no more. It still holds the folder's
// lock, if there is one, so that nobody else opens what is about to be moved.
type damage struct {
	err  error
	lock *pebble.Lock
}

func (d *damage) Error() string { return d.err.Error() }

func (d *damage) unlock() error {
	if d.lock == nil {
		return nil
	}
	return d.lock.Close()
}

// openFolder returns a *damage when a new folder in this one's place would help.
func openFolder(cfg Config) (*Index, error) {
	if err := cfg.FS.MkdirAll(cfg.Dir, 0o755); err != nil {
		if wrongType(err) {
			return nil, &damage{err: err}
		}
		return nil, err
	}
	if err := roomToOpen(cfg); err != nil {
		return nil, err
	}
	lock, err := pebble.LockDirectory(cfg.Dir, cfg.FS)
	if err != nil {
		if wrongType(err) {
			return nil, &damage{err: err}
		}
		return nil, fmt.Errorf("lock the folder: %w; another process may have it open", err)
	}
	x := &Index{fs: cfg.FS, dir: cfg.Dir, lock: lock}
	err = guard(func() (err error) {
		x.db, err = pebble.Open(cfg.Dir, options(cfg, lock))
		return err
	})
	if err == nil {
		if err = guard(x.load); err == nil {
			return x, nil
		}
		err = errors.Join(err, x.db.Close())
	}
	if isDamage(err) {
		return nil, &damage{err, lock}
	}
	return nil, errors.Join(explain(err), lock.Close())
}

// wrongType is a folder's or file's place taken by something else.
func wrongType(err error) bool {
	var no syscall.Errno
	return errors.As(err, &no) && (no == syscall.ENOTDIR || no == syscall.EISDIR || no == syscall.EEXIST || no == syscall.ELOOP)
}

// isDamage reports whether the bytes of the index are to blame. What the
// operating system says is about the disk or the process, except that a file is
// missing or no file; all else is said by Pebble of what it read.
func isDamage(err error) bool {
	var no syscall.Errno
	if errors.As(err, &no) {
		return no == syscall.ENOENT || wrongType(err)
	}
	return !errors.Is(err, errVersion)
}

func options(cfg Config, lock *pebble.Lock) *pebble.Options {
	o := &pebble.Options{
		FS: vfs.OnDiskFull(cfg.FS, func() {
			cfg.Log.Error("no space left on device for the chunk index, free space", "dir", cfg.Dir)
			time.Sleep(fullPause)
		}),
		Lock:               lock,
		CacheSize:          cfg.CacheSize,
		MemTableSize:       memTableSize,
		FormatMajorVersion: formatVersion,
		// One compaction at a time: conversion needs the processors.
		CompactionConcurrencyRange: func() (int, int) { return 1, 1 },
		Logger:                     logger{cfg.Log},
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) { cfg.Log.Error("chunk index background work failed", "error", err) },
			// Pebble's default ends the process. Here the read that met the
			// damage returns the error.
			DataCorruption: func(info pebble.DataCorruptionInfo) {
				cfg.Log.Error("chunk index file is damaged", "path", info.Path, "error", info.Details)
			},
		},
	}
	for i := range o.Levels {
		l := &o.Levels[i]
		// Most look-ups of new content miss; the filter answers them without
		// reading a block. 10 bits a key: 1 % false positives.
		l.FilterPolicy = bloom.FilterPolicy(10)
		// A look-up reads one key, and digests are everywhere: a block is read for
		// one of its keys and seldom found in the cache again. 36 keys a block keep
		// that short; the index of the blocks is still below 1 byte a key.
		l.BlockSize = 2 << 10
		l.IndexBlockSize = 1 << 20 // one level of it for each table
		// Digests are random: trying costs time and gains nothing.
		l.Compression = func() *sstable.CompressionProfile { return sstable.NoCompression }
	}
	return o
}

// guard turns what Pebble calls fatal during f, a write that failed, into an
// error. It cannot do so for Pebble's own goroutines: there it ends the
// process, and the next start recovers.
func guard(f func() error) (err error) {
	defer func() {
		switch v := recover().(type) {
		case nil:
		case fatalError:
			err = v
		default:
			panic(v)
		}
	}()
	return f()
}

// roomToOpen refuses to open an index whose logs Pebble could not turn into
// table files, which is the first thing it does.
func roomToOpen(cfg Config) error {
	need := int64(openRoom)
	names, err := cfg.FS.List(cfg.Dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".log") {
			continue
		}
		info, err := cfg.FS.Stat(cfg.FS.PathJoin(cfg.Dir, name))
		if err != nil {
			return err
		}
		need += info.Size()
	}
	return room(cfg.FS, cfg.Dir, need)
}

// Room fails with ENOSPC when a change would. Work that ends in a change asks
// before it begins.
func (x *Index) Room() error { return room(x.fs, x.dir, commitRoom) }

// room fails with ENOSPC when fewer bytes than that are free on the disk. One
// that does not tell has room.
func room(fs vfs.FS, dir string, need int64) error {
	usage, err := fs.GetDiskUsage(dir)
	if err != nil || usage.AvailBytes >= uint64(need) {
		return nil
	}
	return fmt.Errorf("%w: the chunk index needs %d MiB free in %s, there are %d: free space and try again",
		syscall.ENOSPC, (need+1<<20-1)>>20, dir, usage.AvailBytes>>20)
}

// explain says what to do about a full disk.
func explain(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: free space and try again", err)
	}
	return err
}
