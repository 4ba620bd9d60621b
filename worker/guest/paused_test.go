package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"quarry/worker/guest"
	"quarry/worker/sandbox"
)

// pausedFiles are those of a guest of which there is only Cat.
func pausedFiles(t *testing.T, l guest.Limits, cat func(ctx context.Context, path string, out *os.File) error) *guest.Files {
	t.Helper()
	f := guest.New(guest.Config{Runner: &cell{cat: cat}, WorkDir: "/w", Limits: l})
	t.Cleanup(f.Close)
	return f
}

func readPaused(f *guest.Files, name string, o sandbox.ReadOptions) ([]byte, sandbox.FileInfo, error) {
	var b bytes.Buffer
	var info sandbox.FileInfo
	err := f.ReadPaused(context.Background(), name, o, func(i sandbox.FileInfo) error { info = i; return nil }, &b)
	return b.Bytes(), info, err
}

func TestAPausedGuestIsRead(t *testing.T) {
	for _, n := range []int{1, 64<<10 + 1, 1 << 20, 1<<20 + 1, 5 << 20} {
		b := content(n)
		f := pausedFiles(t, guest.Limits{}, func(_ context.Context, p string, out *os.File) error {
			if p != "/w/file" {
				return fmt.Errorf("path %q", p)
			}
			_, err := out.Write(b)
			return err
		})
		for _, o := range []sandbox.ReadOptions{{Length: -1}, {Offset: 1, Length: 3}, {Offset: int64(n) / 2, Length: -1}, {Offset: int64(n) + 1, Length: -1}, {Offset: 1<<20 - 1, Length: 2}, {Length: 0}, {Offset: -3, Length: -1}, {Offset: -1 << 40, Length: -1}} {
			from, to := o.Part(int64(n))
			from = min(from, int64(n))
			to += from
			got, i, err := readPaused(f, "file", o)
			if err != nil || !bytes.Equal(got, b[from:to]) || i.Size != int64(n) || i.Path != "/w/file" {
				t.Errorf("%d bytes, %+v: %d read, %+v, %v", n, o, len(got), i, err)
			}
		}
	}
}

func TestWhatTheSentrySaysIsTyped(t *testing.T) {
	for text, want := range map[string]error{
		"cannot read from file /is a directory: failed to open file /is a directory: no such file or directory": sandbox.ErrFileNotFound,
		"cannot read from file /w: is a directory":                                                              sandbox.ErrFileType,
		"cannot read from file /w/x: failed to open file /w/x: too many symbolic links encountered":             sandbox.ErrFilePath,
	} {
		f := pausedFiles(t, guest.Limits{}, func(context.Context, string, *os.File) error { return errors.New(text) })
		if _, _, err := readPaused(f, "x", all); !errors.Is(err, want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	f := pausedFiles(t, guest.Limits{}, func(_ context.Context, _ string, out *os.File) error {
		_, _ = out.Write([]byte("half"))
		return errors.New("the connection broke")
	})
	if _, _, err := readPaused(f, "x", all); err == nil {
		t.Error("half a file is no file")
	}
}

func TestAFIFOThatAPausedGuestPlantedIsStuckAndCounted(t *testing.T) {
	freed := make(chan struct{})
	f := pausedFiles(t, guest.Limits{Paused: 20 * time.Millisecond, Stuck: 2}, func(ctx context.Context, p string, out *os.File) error {
		if p != "/w/fifo" {
			_, err := out.Write([]byte("x"))
			return err
		}
		select {
		case <-freed:
		case <-ctx.Done():
		}
		return nil
	})
	for range 2 {
		if _, _, err := readPaused(f, "fifo", all); !errors.Is(err, sandbox.ErrFileStuck) {
			t.Error(err)
		}
	}
	if _, _, err := readPaused(f, "file", all); !errors.Is(err, sandbox.ErrFileStuck) {
		t.Errorf("a third one: %v", err)
	}
	close(freed) // somebody writes into the fifo
	for {
		b, _, err := readPaused(f, "file", all)
		if err == nil && string(b) == "x" {
			return
		}
		if !errors.Is(err, sandbox.ErrFileStuck) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestAnEndlessFileOfAPausedGuestEnds(t *testing.T) {
	zero := func(_ context.Context, _ string, out *os.File) error {
		b := make([]byte, 64<<10)
		for {
			if _, err := out.Write(b); err != nil {
				return err
			}
		}
	}
	f := pausedFiles(t, guest.Limits{PausedBytes: 8 << 20}, zero)
	if _, i, err := readPaused(f, "zero", all); !errors.Is(err, sandbox.ErrNotReady) || !errors.Is(err, guest.ErrUnclear) || errors.Is(err, guest.ErrEmpty) || i.Path != "" {
		t.Error(i, err)
	}
	for _, name := range []string{"/dev/zero", "/w/../dev/tty", "\xff", ""} {
		if _, _, err := readPaused(f, name, all); err == nil {
			t.Errorf("%q is read", name)
		}
	}
}

// A null device gives what an empty file gives, wherever the guest has made it: it is
// taken for one only by who says so.
func TestNoByteOfAPausedGuestIsNoFile(t *testing.T) {
	f := pausedFiles(t, guest.Limits{}, func(context.Context, string, *os.File) error { return nil })
	if _, i, err := readPaused(f, "null", all); !errors.Is(err, sandbox.ErrNotReady) || !errors.Is(err, guest.ErrEmpty) || i.Path != "" {
		t.Error(i, err)
	}
	var i sandbox.FileInfo
	if err := f.Empty("null", func(what sandbox.FileInfo) error { i = what; return nil }); err != nil || i.Path != "/w/null" || i.Type != sandbox.TypeFile || i.Size != 0 {
		t.Error(i, err)
	}
	f = pausedFiles(t, guest.Limits{}, func(_ context.Context, _ string, out *os.File) error {
		_, err := out.WriteString("x")
		return err
	})
	if b, _, err := readPaused(f, "/dev/shm/x", all); err != nil || string(b) != "x" {
		t.Errorf("a file of /dev/shm: %q, %v", b, err)
	}
}
