package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Config says where a corpus is and how it is built.
type Config struct {
	Dir     string // one layout folder an image, and the caches of pip and npm
	Debs    string // package archives; shared with other builders
	Recipes []Recipe
	Jobs    int       // images built at once
	Log     io.Writer // one line an image
}

// ramSize bounds the file systems that Jobs images have while they are built: two
// of 1 GiB, their package archives, and as much again in reserve.
const ramSize = "6g"

// Run builds the images that are missing or whose recipe has changed. An image
// appears whole or not at all, and a build that was stopped goes on where it
// was. The file systems are in memory, mounted where nobody else sees them:
// Run must be in a mount namespace of its own, whose end removes them.
func Run(ctx context.Context, cfg Config) error {
	for _, tool := range []string{"mmdebstrap", "unshare", "chroot"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("no %s: run make setup, which installs it", tool)
		}
	}
	for _, dir := range []string{cfg.Dir, cfg.Debs} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	unlock, err := lock(filepath.Join(cfg.Dir, ".lock"))
	if err != nil {
		return err
	}
	defer unlock()
	b := &builder{cfg: cfg, ram: filepath.Join(cfg.Dir, ".ram")}
	if err := b.mountRAM(); err != nil {
		return err
	}
	missing := slices.DeleteFunc(slices.Clone(cfg.Recipes), func(r Recipe) bool { return built(b.layout(r), r) })
	if len(missing) == 0 {
		return nil
	}
	if err := b.fetchLists(ctx); err != nil {
		return err
	}
	errs := make([]error, len(missing)) // one that fails does not stop the others
	var g errgroup.Group
	g.SetLimit(cfg.Jobs)
	for i, r := range missing {
		g.Go(func() error {
			if ctx.Err() != nil {
				return nil
			}
			if err := b.image(ctx, r); err != nil {
				errs[i] = fmt.Errorf("image %s: %w", r.Name(), err)
				b.say("%-18s failed", r.Name())
			}
			return nil
		})
	}
	return errors.Join(append(errs, g.Wait(), ctx.Err())...)
}

type builder struct {
	cfg Config
	ram string
	mu  sync.Mutex // guards Log
}

func (b *builder) layout(r Recipe) string { return filepath.Join(b.cfg.Dir, r.Name()) }

// lock keeps two builds from working in one folder.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w (another make corpus is at work; wait for it)", path, err)
	}
	return func() { f.Close() }, nil
}

func (b *builder) mountRAM() error {
	if err := os.MkdirAll(b.ram, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("corpus", b.ram, "tmpfs", 0, "mode=0755,size="+ramSize); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w (building images needs root)", b.ram, err)
	}
	return nil
}

// image builds one image from nothing and puts its layout in place.
func (b *builder) image(ctx context.Context, r Recipe) (err error) {
	start := time.Now()
	work := filepath.Join(b.ram, r.Name())
	if err := os.Mkdir(work, 0o755); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	w, err := newWriter(filepath.Join(b.cfg.Dir, "."+r.Name()+".new"))
	if err != nil {
		return err
	}
	defer w.discard()
	root := filepath.Join(work, "root")
	if err := b.base(ctx, r, work, root); err != nil {
		return fmt.Errorf("base: %w", err)
	}
	old := snapshot{}
	for i := 0; ; i++ {
		if old, err = w.addLayer(root, old, r.Order); err != nil {
			return fmt.Errorf("layer %d: %w", i+1, err)
		}
		if i == len(r.Steps) {
			break
		}
		if err := b.step(ctx, work, root, r.Steps[i]); err != nil {
			return fmt.Errorf("layer %d: %w", i+2, err)
		}
	}
	if err := w.publish(b.layout(r), r, start); err != nil {
		return err
	}
	b.say("%-18s %d layers, %4.0f MB, %3.0f s", r.Name(), len(w.layers), float64(w.size)/1e6, time.Since(start).Seconds())
	return nil
}

// say prints a line of progress; whether it is seen changes nothing.
func (b *builder) say(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fmt.Fprintf(b.cfg.Log, format+"\n", args...)
}

// copyNew copies the files of a folder that another folder lacks, each at once
// whole: several builds share the target.
func copyNew(from, to, pattern string) error {
	files, err := filepath.Glob(filepath.Join(from, pattern))
	if err != nil {
		return err
	}
	for _, f := range files {
		target := filepath.Join(to, filepath.Base(f))
		if _, err := os.Stat(target); !errors.Is(err, fs.ErrNotExist) {
			if err != nil {
				return err
			}
			continue
		}
		if err := copyFile(f, target); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.CreateTemp(filepath.Dir(to), ".new")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name()) // gone already unless something failed
	_, err = io.Copy(out, in)
	if err = errors.Join(err, out.Chmod(0o644), out.Close()); err != nil {
		return err
	}
	return os.Rename(out.Name(), to)
}
