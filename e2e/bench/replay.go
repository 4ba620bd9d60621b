package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"quarry/e2e/lab"
	"quarry/internal/storm"
)

const (
	replayImage = "bench/replay"
	// replayFiles of 64 KiB to 1 MiB, in all 27 MiB, fit in a reader's memory, so
	// that what is measured is its absence and not its store.
	replayFiles = 50
	// replayReaders are processes that read all the time.
	replayReaders = 8
	// replayEvery is how long a reader lives.
	replayEvery = 200 * time.Millisecond
	// replayTime is the length of the storm.
	replayTime = time.Minute
	// maxStallMillis is what one read in a hundred may take in a storm.
	maxStallMillis = 1000
)

// replayed returns the content of file i.
func replayed(i int) (name string, size int64, content io.Reader) {
	return fmt.Sprintf("f%d", i), int64(64<<10 + i*20_011), rand.NewChaCha8([32]byte{2, byte(i)})
}

// measureReplay kills the reader again and again under processes that read and
// compare every byte, and says how long they stalled.
func measureReplay(ctx context.Context, b *bench) (err error) {
	source, err := generated(b.cache, "replay-50-files", writeReplayed)
	if err != nil {
		return err
	}
	want, data, worker, mount := b.lab.Path("replay.root"), b.lab.Path("replay"), b.lab.Path("replay.w"), b.lab.Path("replay.m")
	if err := errors.Join(os.Mkdir(want, 0o755), os.Mkdir(mount, 0o755)); err != nil {
		return err
	}
	for i := range replayFiles {
		name, size, content := replayed(i)
		raw := make([]byte, size)
		if _, err := io.ReadFull(content, raw); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(want, name), raw, 0o644); err != nil {
			return err
		}
	}
	if _, err := b.lab.Convert(ctx, data, "oci:"+source.dir, replayImage); err != nil {
		return err
	}
	if _, err := b.lab.Quarry(ctx, "mount", "--data", data, "--worker-dir", worker, replayImage, mount); err != nil {
		return err
	}
	defer func() {
		_, umountErr := b.lab.Quarry(context.WithoutCancel(ctx), "umount", "--worker-dir", worker, mount)
		err = errors.Join(err, umountErr)
	}()
	manifest := b.lab.Path("replay.manifest")
	if err := storm.Manifest(manifest, want, mount); err != nil {
		return err
	}
	readers, err := storm.Start(ctx, replayReaders, manifest)
	if err != nil {
		return err
	}
	kills := killReaders(ctx, worker)
	v, err := readers.End()
	if err != nil {
		return err
	}
	b.figure("replay: readers killed in a minute", fmt.Sprintf("%d; %d files of %d reads compared", kills, v.Files, v.Reads))
	b.atMost("replay: reads that failed", float64(len(v.Failed)), 0, "reads")
	b.atMost("replay: stall that one read in 100 exceeds", millis(v.Longest(100)), maxStallMillis, "ms")
	b.figure("replay: one in 1000; the longest", fmt.Sprintf("%.3g ms; %.3g ms", millis(v.Longest(1000)), millis(v.Longest(v.Reads+1))))
	return nil
}

func millis(d time.Duration) float64 { return d.Seconds() * 1000 }

// killReaders kills the reader of a worker folder as often as it is there.
func killReaders(ctx context.Context, worker string) (kills int) {
	for end := time.Now().Add(replayTime); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(replayEvery) {
		pids, err := lab.Find("reader", "--worker-dir", worker)
		if err != nil {
			continue
		}
		for _, pid := range pids {
			if syscall.Kill(pid, syscall.SIGKILL) == nil {
				kills++
			}
		}
	}
	return kills
}

func writeReplayed(t *tar.Writer) error {
	for i := range replayFiles {
		name, size, content := replayed(i)
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: time.Unix(1_700_000_000, 0), Size: size}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.CopyN(t, content, size); err != nil {
			return err
		}
	}
	return nil
}
