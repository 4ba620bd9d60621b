// Command record writes down which pages of an image's device a cold command
// reads, and in which order, for tests that read the same pages of made-up
// content: nbd/blockdev/testdata has its output, and make record makes it again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"quarry/api/client"
	"quarry/e2e/lab"
	"quarry/nbd"
	"quarry/nbd/attach"
	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

const blockSize = 4096

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	out := flag.String("out", "", "folder that gets image.txt.gz and a NAME.txt.gz for every command")
	flag.Parse()
	if err := run(ctx, *out); err != nil {
		fmt.Fprintln(os.Stderr, "record:", err)
		os.Exit(1)
	}
}

// commands are what is recorded, by the name of the file.
var commands = []struct {
	name string
	args []string
}{
	{"pip-version", []string{"pip", "--version"}},
	{"python-print", []string{"python3", "-c", "print(1)"}},
}

func run(ctx context.Context, out string) (err error) {
	l, err := lab.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	layout, _, err := lab.DebianImages()
	if err != nil {
		return err
	}
	data := l.Path("data")
	if _, err := l.Convert(ctx, data, "oci:"+layout, "record/debian"); err != nil {
		return err
	}
	server, err := l.Serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	c, err := client.New(client.Config{URL: server.URL})
	if err != nil {
		return err
	}
	defer c.Close()
	im, boot, err := open(ctx, c, filepath.Join(data, "keys", "signing.pub"), "record/debian")
	if err != nil {
		return err
	}
	if err := writeShape(ctx, filepath.Join(out, "image.txt.gz"), c, im); err != nil {
		return err
	}
	for _, cmd := range commands {
		reads, err := record(ctx, l.Path(cmd.name), c, im, boot, cmd.args)
		if err != nil {
			return fmt.Errorf("%s: %w", strings.Join(cmd.args, " "), err)
		}
		if err := writeReads(filepath.Join(out, cmd.name+".txt.gz"), strings.Join(cmd.args, " "), im, reads); err != nil {
			return err
		}
	}
	return nil
}

// open gets an image as a worker does.
func open(ctx context.Context, c *client.Client, keys, name string) (*rafs.Image, []byte, error) {
	trust, err := signer.LoadTrust(keys)
	if err != nil {
		return nil, nil, err
	}
	ref, err := image.ParseRef(name)
	if err != nil {
		return nil, nil, err
	}
	doc, err := c.Image(ctx, ref, image.HostPlatform())
	if err != nil {
		return nil, nil, err
	}
	v, err := image.Verify(doc.Image, doc.Name, image.Want{Ref: ref, Platform: image.HostPlatform(), Trust: trust})
	if err != nil {
		return nil, nil, err
	}
	boot, err := c.Bootstrap(ctx, v.Statement.Bootstrap, v.Statement.BootstrapSize)
	if err != nil {
		return nil, nil, err
	}
	im, err := rafs.Decode(boot)
	return im, boot, err
}

// read is one read of the data device.
type read struct{ off, length int64 }

// recorder is a device that remembers the reads of its data.
type recorder struct {
	*blockdev.Device
	mapped int64

	mu    sync.Mutex // guards reads
	reads []read
}

func (r *recorder) ReadAt(ctx context.Context, p []byte, off int64) error {
	r.mu.Lock()
	if end := off + int64(len(p)); end > r.mapped {
		r.reads = append(r.reads, read{max(off-r.mapped, 0), end - max(off, r.mapped)})
	}
	r.mu.Unlock()
	return r.Device.ReadAt(ctx, p, off)
}

// record runs a command in a mount of its own.
func record(ctx context.Context, dir string, c *client.Client, im *rafs.Image, boot []byte, args []string) (reads []read, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	d, err := blockdev.New(blockdev.Config{Bootstrap: boot, Image: im, Chunks: c})
	if err != nil {
		return nil, err
	}
	defer d.Close()
	r := &recorder{Device: d, mapped: im.Blob.MappedOff}
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &nbd.Server{Exports: func(context.Context, string) (nbd.Device, error) { return r, nil }}
	go s.Serve(ctx, l) // ends with ctx
	src, err := nbd.Dial(ctx, "unix", l.Addr().String(), "image")
	if err != nil {
		return nil, err
	}
	defer src.Close()
	a, err := attach.Attach(ctx, attach.Config{Dir: filepath.Join(dir, "m"), Source: src, DataOff: im.Blob.MappedOff})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.Detach(context.WithoutCancel(ctx))) }()
	if err := inImage(ctx, a.Root(), args); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reads, nil
}

// enterImage runs a command in an image: $1 is its root, the rest the command.
// The mounts end with it. PATH is the image's.
const enterImage = `
mount -t tmpfs tmp "$1/tmp"
mount --bind /dev "$1/dev"
mount -t proc proc "$1/proc"
root=$1
shift
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \
	unshare --root="$root" --wd=/ "$@"
`

func inImage(ctx context.Context, root string, args []string) error {
	args = append([]string{"--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "sh", "-e", "-c", enterImage, "sh", root}, args...)
	out, err := exec.CommandContext(ctx, "unshare", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// writeShape writes a line for every chunk: its length, its stored length, and
// a d when its file is in another folder than the one before.
func writeShape(ctx context.Context, name string, c *client.Client, im *rafs.Image) error {
	folder := map[chunk.Digest]string{}
	im.Walk(func(p string, n *rafs.Inode) error { // whose function returns no error
		for _, d := range n.Chunks {
			if _, ok := folder[d]; !ok {
				folder[d] = path.Dir(p)
			}
		}
		return nil
	})
	stored, err := storedLengths(ctx, c, im.Blob.Chunks)
	if err != nil {
		return err
	}
	var b strings.Builder
	last := ""
	for _, k := range im.Blob.Chunks {
		mark := ""
		if f := folder[k.Digest]; f != last {
			mark, last = " d", f
		}
		fmt.Fprintf(&b, "%d %d%s\n", k.Len, stored[k.Digest], mark)
	}
	return writeFile(name, b.String())
}

// storedLengths packs every chunk as the store does.
func storedLengths(ctx context.Context, c *client.Client, chunks []rafs.Chunk) (map[chunk.Digest]int, error) {
	stored := map[chunk.Digest]int{}
	for len(chunks) > 0 {
		n := min(len(chunks), 128)
		var ds []chunk.Digest
		for _, k := range chunks[:n] {
			ds = append(ds, k.Digest)
		}
		err := c.GetBatch(ctx, ds, func(d chunk.Digest, p []byte, err error) error {
			if err == nil {
				_, z := pack.Compress(nil, p)
				stored[d] = len(z)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		chunks = chunks[n:]
	}
	return stored, nil
}
