// Package guest reads and writes the files of a running sandbox from the host. It
// starts the helper program (cmd/quarry-guest) in the guest for one call each, by an
// open file, so that nothing of it is in the image or stays behind, and speaks
// package wire with it. The guest is hostile, and so is the helper once it runs
// there: everything it answers is bounded, checked and given a time.
package guest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// Program is the name of the helper, as argv[0] and beside quarry.
const Program = "quarry-guest"

// Runner runs the helper in one guest and reads files without it. The node
// implements it with the sandbox's holder. Its methods may be called at once from any
// number of goroutines.
type Runner interface {
	// Run starts the helper as the guest's root, with the capabilities that docker
	// gives, and returns when it has ended, with its exit status. It takes no file
	// over and closes none. When ctx ends it kills the helper and returns.
	Run(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (exit int, err error)
	// Cat copies a file to out without a process of the guest: the control RPC
	// Fs.Cat. It also works while the guest is paused. It has no time of its own and
	// returns when the RPC does, the sandbox has ended, or ctx ends, whatever becomes
	// of the RPC then. The path is absolute and UTF-8. What the Sentry answered is at
	// the end of the error's text.
	Cat(ctx context.Context, path string, out *os.File) error
}

// Mounter is what Give and Take need beyond a Runner.
type Mounter interface {
	// Mount puts an EROFS image at a folder or file of the guest, read-only: the
	// control RPC containerManager.Mount. It takes the file over neither.
	Mount(ctx context.Context, image *os.File, target string) error
	// RunAdmin is Runner.Run with CAP_SYS_ADMIN too.
	RunAdmin(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (exit int, err error)
}

// Owner is who owns what is made.
type Owner struct{ UID, GID uint32 }

// Limits bound what a guest can make the host do. Zero fields are the defaults.
type Limits struct {
	Entries     int64         // files of a list, or of a tar; sandbox.MaxFiles
	Bytes       int64         // content of a read or of a tar; sandbox.MaxContent
	Idle        time.Duration // how long the guest may give no byte and take none; 30 s
	Paused      time.Duration // the same of a read of a paused guest; 2 s
	PausedBytes int64         // content of a read of a paused guest; 256 MiB
	Stuck       int           // reads of a paused guest at once, with those that never came back; 8
}

// Config says whose files they are.
type Config struct {
	Runner  Runner
	Mounter Mounter // nil: Give and Take are sandbox.ErrUnsupported
	WorkDir string  // of the sandbox: where relative paths begin
	Spool   string  // folder of the host for what is read of a paused guest, and for images of shares; "" is os.TempDir
	Limits  Limits
	Log     *slog.Logger // nil discards
}

// Files are the files of one guest. Its methods may be called at once from any number
// of goroutines. Errors are those of package sandbox, wrapped. All but ReadPaused
// need a guest that is not paused: in a paused one the helper does not run, and they
// end with sandbox.ErrFileStuck after Limits.Idle. Close them with the sandbox.
type Files struct {
	c    Config
	life context.Context // of reads by Cat, until Close
	end  context.CancelFunc
	cats sync.WaitGroup // reads by Cat under way
	mu   sync.Mutex     // guards what follows
	// reading counts them. One that opened a fifo holds a goroutine of the Sentry
	// until something is written into that.
	reading int
	stuck   map[string]bool // paths of which a read was given up while it waited
	closed  bool
}

// New returns the files of a guest.
func New(c Config) *Files {
	l := &c.Limits
	if l.Entries == 0 {
		l.Entries = sandbox.MaxFiles
	}
	if l.Bytes == 0 {
		l.Bytes = sandbox.MaxContent
	}
	if l.Idle == 0 {
		l.Idle = 30 * time.Second
	}
	if l.Paused == 0 {
		l.Paused = 2 * time.Second
	}
	if l.PausedBytes == 0 {
		l.PausedBytes = 256 << 20
	}
	if l.Stuck == 0 {
		l.Stuck = 8
	}
	if c.WorkDir == "" {
		c.WorkDir = "/"
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	f := &Files{c: c}
	f.life, f.end = context.WithCancel(context.Background())
	return f
}

// resolve makes a path absolute. It does not clean it: what ".." after a link means
// only the guest knows.
func (f *Files) resolve(name string) (string, error) {
	if name == "" || strings.Contains(name, "\x00") {
		return "", fmt.Errorf("%w: %q is empty or has a zero byte", sandbox.ErrFilePath, name)
	}
	if !path.IsAbs(name) {
		name = strings.TrimRight(f.c.WorkDir, "/") + "/" + name
	}
	if len(name) >= wire.MaxPath {
		return "", fmt.Errorf("%w: it has %d bytes, and %d are possible", sandbox.ErrFilePath, len(name), wire.MaxPath-1)
	}
	return name, nil
}
