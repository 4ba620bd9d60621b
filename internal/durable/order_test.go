package durable_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"quarry/internal/durable"
	"quarry/internal/need"
)

// opLog is what a file system was asked to do, in order.
type opLog struct {
	mu  sync.Mutex
	ops []string
}

func (l *opLog) add(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ops = append(l.ops, fmt.Sprintf(format, args...))
}

// take returns the operations since the last take.
func (l *opLog) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ops := l.ops
	l.ops = nil
	return ops
}

// loggedNode passes everything on to a folder and logs what matters for what is
// left after a loss of power.
type loggedNode struct {
	*fs.LoopbackNode
	log *opLog
}

func (n *loggedNode) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &loggedNode{ops.(*fs.LoopbackNode), n.log}
}

func (n *loggedNode) name(child string) string { return filepath.Join(n.Path(n.Root()), child) }

func (n *loggedNode) Write(ctx context.Context, f fs.FileHandle, p []byte, off int64) (uint32, syscall.Errno) {
	n.log.add("write %s", n.name(""))
	return f.(fs.FileWriter).Write(ctx, p, off)
}

// loggedFile is a new file without the pass-through that would hide its writes.
type loggedFile struct {
	fs.FileWriter
	fs.FileReleaser
}

func (n *loggedNode) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	inode, h, fuseFlags, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	return inode, &loggedFile{h.(fs.FileWriter), h.(fs.FileReleaser)}, fuseFlags, 0
}

func (n *loggedNode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	n.log.add("fsync %s", n.name(""))
	return 0
}

func (n *loggedNode) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.log.add("mkdir %s", n.name(name))
	return n.LoopbackNode.Mkdir(ctx, name, mode, out)
}

func (n *loggedNode) Unlink(ctx context.Context, name string) syscall.Errno {
	n.log.add("unlink %s", n.name(name))
	return n.LoopbackNode.Unlink(ctx, name)
}

func (n *loggedNode) Rename(ctx context.Context, name string, newParent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	parent := newParent.(*loggedNode)
	n.log.add("rename %s %s", n.name(name), parent.name(newName))
	return n.LoopbackNode.Rename(ctx, name, parent.LoopbackNode, newName, flags)
}

func (n *loggedNode) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	from := target.(*loggedNode)
	n.log.add("link %s %s", from.name(""), n.name(name))
	return n.LoopbackNode.Link(ctx, from.LoopbackNode, name, out)
}

// loggedDir is an open folder.
type loggedDir struct {
	fs.FileReaddirenter
	fs.FileReleasedirer
	node *loggedNode
}

func (d *loggedDir) Fsyncdir(context.Context, uint32) syscall.Errno {
	d.node.log.add("fsync %s/", d.node.name(""))
	return 0
}

func (n *loggedNode) OpendirHandle(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	h, fuseFlags, errno := n.LoopbackNode.OpendirHandle(ctx, flags)
	if errno != 0 {
		return nil, 0, errno
	}
	return &loggedDir{h.(fs.FileReaddirenter), h.(fs.FileReleasedirer), n}, fuseFlags, 0
}

// mountLogged mounts a file system that logs, and returns where.
func mountLogged(t *testing.T) (string, *opLog) {
	t.Helper()
	need.Root(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Fatalf("the kernel has no FUSE: %v", err)
	}
	root, err := fs.NewLoopbackRoot(t.TempDir())
	must(t, err)
	log := &opLog{}
	path := t.TempDir()
	server, err := fs.Mount(path, &loggedNode{root.(*fs.LoopbackNode), log},
		&fs.Options{MountOptions: fuse.MountOptions{DirectMount: true}})
	must(t, err)
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return path, log
}

func wantOps(t *testing.T, log *opLog, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, log.take()); diff != "" {
		t.Errorf("operations (-want +got):\n%s", diff)
	}
}

// TestOrderOfOperations pins what durability consists of: content before its
// name, and every name before the call returns.
func TestOrderOfOperations(t *testing.T) {
	path, log := mountLogged(t)
	dir := filepath.Join(path, "x", "y")
	f, err := durable.OpenFolder(dir)
	must(t, err)
	wantOps(t, log, "mkdir x", "fsync /", "mkdir x/y", "fsync x/", "mkdir x/y/tmp")

	must(t, f.Replace("a/b/c", text("one")))
	wantOps(t, log, "write x/y/tmp/1", "fsync x/y/tmp/1",
		"mkdir x/y/a", "fsync x/y/", "mkdir x/y/a/b", "fsync x/y/a/",
		"rename x/y/tmp/1 x/y/a/b/c", "fsync x/y/a/b/")

	must(t, f.Create("a/d", text("two")))
	wantOps(t, log, "write x/y/tmp/2", "fsync x/y/tmp/2", "link x/y/tmp/2 x/y/a/d", "fsync x/y/a/", "unlink x/y/tmp/2")

	must(t, f.Remove("a/d"))
	wantOps(t, log, "unlink x/y/a/d", "fsync x/y/a/")
	must(t, f.Remove("a/d"))
	wantOps(t, log, "fsync x/y/a/")

	must(t, f.Close())
	f, err = durable.OpenFolder(dir)
	must(t, err)
	defer f.Close()
	log.take()
	// The process before may have died between mkdir and fsync.
	must(t, f.Replace("a/b/c", text("three")))
	wantOps(t, log, "write x/y/tmp/1", "fsync x/y/tmp/1", "fsync x/y/", "fsync x/y/a/",
		"rename x/y/tmp/1 x/y/a/b/c", "fsync x/y/a/b/")
}

// TestOrderOfWriteFile is the same for files outside a Folder.
func TestOrderOfWriteFile(t *testing.T) {
	path, log := mountLogged(t)
	random := regexp.MustCompile(`\.tmp\d+`)
	ops := func() string { return random.ReplaceAllString(strings.Join(log.take(), ", "), ".tmp") }

	must(t, durable.WriteFile(filepath.Join(path, "key"), []byte("x"), 0o600))
	if got, want := ops(), "write .key.tmp, fsync .key.tmp, rename .key.tmp key, fsync /"; got != want {
		t.Errorf("WriteFile:\n got %s\nwant %s", got, want)
	}
	must(t, durable.CreateFile(filepath.Join(path, "new"), []byte("x"), 0o600))
	if got, want := ops(), "write .new.tmp, fsync .new.tmp, link .new.tmp new, fsync /, unlink .new.tmp"; got != want {
		t.Errorf("CreateFile:\n got %s\nwant %s", got, want)
	}
}
