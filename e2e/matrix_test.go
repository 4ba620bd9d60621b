package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/e2e/lab"
	"quarry/e2e/lab/proxy"
	"quarry/internal/need"
)

// What a cell of the fault matrix may say.
const (
	right    = "right"                // every read, during the fault and after it
	waits    = "waits, then right"    // nothing ends before the fault does, and nothing fails
	eio      = "EIO, then right"      // while the fault lasts, and right on the same mount as soon as it is over
	remount  = "EIO, right remounted" // the same mount stays broken, a new one is not
	refused  = "refused, then right"  // the command says so and fails
	failed   = "125, then right"      // the run says that it failed; bytes it saw were right
	wrong    = "WRONG BYTES"
	hang     = "HANG"
	surprise = "OTHER ERROR"
)

const (
	// patience is how long something has to wait for the end of a fault, which is
	// ended then.
	patience = time.Second
	// readTimeout is the reader's where a fault lasts until reads have failed. A file
	// takes two: the kernel reads again what its read-ahead did not get.
	readTimeout = 2 * time.Second
	// forever is how long anything may take that must end; beyond is a hang.
	forever = 5 * time.Minute
	// strikeAfter is how many files have been read when a fault strikes reads.
	strikeAfter = 5
	// together is how many cells are played at a time: most of the time they wait.
	together    = 4
	matrixFiles = 24
	matrixImage = "t/matrix"
)

// fault is one row of the matrix.
type fault struct {
	name   string
	strike func(*cell) error
	mend   func(*cell) error // after reads; nil: it mends itself, or not at all
	soon   bool              // it is mended while reads wait for that
	lasts  bool              // reads cannot wait for its end
	shared bool              // it changes the store, which other cells use too
	prime  bool              // the image was read before, and is on the cache disk
	alive  bool              // before a mount, the image is mounted in another place
	small  bool              // the cache has a small disk of its own
	again  bool              // what is on the cache disk has to come from the store again
	moves  bool              // whoever mounts during it gets the other image
	want   [4]string         // by column: what happens; "" is a cell that makes no sense
}

var columns = [4]string{"before a mount", "idle mount", "during reads", "under runsc"}

// matrix is what the cells share.
type matrix struct {
	*lab.Lab
	t      *testing.T
	data   string
	server *lab.Server
	image  string // OCI layout
	tree   knownTree
	size   int64 // of the files of tree

	moved     string // another layout, for the tag that moves
	movedTree knownTree
}

// cell is one fault at one time.
type cell struct {
	*matrix
	fault
	ctx    context.Context
	net    *proxy.Proxy
	worker string
	mount  string
	tree   knownTree    // what its mount has
	log    bytes.Buffer // what commands said
}

// TestFaultMatrix lets everything that can die or lie do so, at every time, under
// reads that know what the right bytes are. make faults prints the table.
func TestFaultMatrix(t *testing.T) {
	need.Root(t)
	for _, tool := range []string{"runsc", "umoci", "busybox", "tar"} {
		need.Tool(t, tool)
	}
	m := newMatrix(t)
	rows := faults()
	table := make([][]string, len(rows))
	m.play(rows, table, 1, func(f fault) bool { return f.shared })
	m.play(rows, table, together, func(f fault) bool { return !f.shared })
	head := append([]string{"what × when"}, columns[:]...)
	t.Logf("fault matrix:\n%s", grid(append([][]string{head}, table...)))
}

// play plays the cells of the chosen rows, n at a time, and writes what they say
// to the table.
func (m *matrix) play(rows []fault, table [][]string, n int, chosen func(fault) bool) {
	var g errgroup.Group
	g.SetLimit(n)
	for row, f := range rows {
		if !chosen(f) {
			continue
		}
		table[row] = append([]string{f.name}, make([]string, len(columns))...)
		for col := range columns {
			if f.want[col] == "" {
				table[row][1+col] = "-"
				continue
			}
			g.Go(func() error {
				got, said := m.cell(f, col, fmt.Sprintf("%02d%d", row, col))
				if got != f.want[col] {
					m.t.Errorf("%s, %s: %s, want %s\n%s", f.name, columns[col], got, f.want[col], said)
				}
				table[row][1+col] = got
				return nil
			})
		}
	}
	g.Wait()
}

func grid(table [][]string) string {
	var b strings.Builder
	for _, line := range table {
		for i, text := range line {
			width := 0
			for _, other := range table {
				width = max(width, len([]rune(other[i])))
			}
			fmt.Fprintf(&b, "%s%s  ", text, strings.Repeat(" ", width-len([]rune(text))))
		}
		b.WriteString("\n")
	}
	return b.String()
}

func newMatrix(t *testing.T) *matrix {
	t.Helper()
	l := newLab(t)
	m := &matrix{Lab: l, t: t, data: l.Path("d"), image: l.Path("image"), moved: l.Path("moved")}
	root := l.Path("root")
	m.tree, m.size = writeKnown(t, root, matrixFiles, 1)
	addBusybox(t, root)
	writeLayout(t, m.image, root)
	other := l.Path("other")
	m.movedTree, _ = writeKnown(t, other, matrixFiles, 2)
	addBusybox(t, other)
	writeLayout(t, m.moved, other)
	if _, err := l.Convert(t.Context(), m.data, "oci:"+m.image, matrixImage); err != nil {
		t.Fatal(err)
	}
	var err error
	if m.server, err = m.Serve(context.WithoutCancel(t.Context()), m.data); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.server.Stop() })
	return m
}

// newCell makes a worker and a network for one cell.
func (m *matrix) newCell(ctx context.Context, f fault, name string) (*cell, error) {
	c := &cell{matrix: m, fault: f, ctx: ctx, worker: m.Path("w" + name), mount: m.Path("m" + name), tree: m.tree}
	if err := errors.Join(os.Mkdir(c.worker, 0o700), os.Mkdir(c.mount, 0o700)); err != nil {
		return nil, err
	}
	if f.small {
		if err := c.smallDisk(); err != nil {
			return nil, err
		}
	}
	var err error
	c.net, err = proxy.New(proxy.Config{Target: m.server.Addr(), RTT: 2 * time.Millisecond})
	return c, err
}

// cell plays one fault at one time.
func (m *matrix) cell(f fault, col int, name string) (got, said string) {
	ctx, cancel := context.WithTimeout(m.t.Context(), forever)
	defer cancel()
	c, err := m.newCell(ctx, f, name)
	if err != nil {
		return surprise, err.Error()
	}
	defer c.leave()
	before := int64(0)
	if f.again {
		c.strike = func(c *cell) error {
			before = c.net.Bytes()
			return f.strike(c)
		}
	}
	type result struct {
		got string
		err error
	}
	done := make(chan result, 1)
	go func() { // ends with the cell, or hangs, which is a failure
		got, err := c.play(col)
		done <- result{got, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return surprise, fmt.Sprintf("%v\n%s", r.err, c.said())
		}
		if came := c.net.Bytes() - before; f.again && came < c.size/2 {
			return surprise, fmt.Sprintf("only %d bytes came again from the store\n%s", came, c.said())
		}
		return r.got, c.said()
	case <-ctx.Done():
		c.net.Mend()
		return hang, c.said()
	}
}

// said is what helps to understand a cell that is not as it should be.
func (c *cell) said() string {
	var b strings.Builder
	b.Write(c.log.Bytes())
	logs, _ := filepath.Glob(filepath.Join(c.worker, "*.log"))
	shims, _ := filepath.Glob(filepath.Join(c.worker, "mounts/*/shim.log"))
	for _, path := range append(logs, shims...) {
		raw, _ := os.ReadFile(path)
		fmt.Fprintf(&b, "%s:\n%s", filepath.Base(path), raw)
	}
	return b.String()
}

// leave mends everything and ends what runs for the cell.
func (c *cell) leave() {
	defer c.net.Close()
	c.net.Mend()
	if err := startStore(c); err != nil { // of a cell that went wrong
		c.t.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), forever)
	defer cancel()
	if isMount(c.mount) {
		if out, err := c.Quarry(ctx, "umount", "--worker-dir", c.worker, c.mount); err != nil {
			c.t.Errorf("umount: %v: %s", err, out)
		}
	}
	if err := c.EndBelow(c.worker); err != nil {
		c.t.Error(err)
	}
	unix.Unmount(filepath.Join(c.worker, "cache"), unix.MNT_DETACH) // where it is a mount
	for _, point := range mountsBelow(c.worker) {
		c.t.Errorf("left mounted: %s", point)
		unix.Unmount(point, unix.MNT_DETACH)
	}
	if err := os.RemoveAll(c.worker); err != nil {
		c.t.Error(err)
	}
}

// smallDisk gives the cache a disk of 8 MiB, less than the image has.
func (c *cell) smallDisk() error {
	dir := filepath.Join(c.worker, "cache")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m,mode=0700"); err != nil {
		return &os.PathError{Op: "mount", Path: dir, Err: err}
	}
	return nil
}

func (c *cell) play(col int) (string, error) {
	if c.prime {
		if err := c.primed(); err != nil {
			return "", err
		}
	}
	switch columns[col] {
	case "before a mount":
		return c.beforeMount()
	case "idle mount":
		return c.idle()
	case "during reads":
		return c.duringReads()
	default:
		return c.underRunsc()
	}
}

// flags lead to the store. What other cells have touched does not come ahead: each
// read has to find out for itself.
func (c *cell) flags() []string {
	flags := []string{"--no-trace", "--store", c.net.URL(), "--trust", filepath.Join(c.data, "keys", "signing.pub"), "--worker-dir", c.worker}
	if c.lasts {
		flags = append(flags, "--read-timeout", readTimeout.String())
	}
	return flags
}

func (c *cell) quarry(args ...string) error {
	out, err := c.Quarry(c.ctx, args...)
	fmt.Fprintf(&c.log, "%s: %v %s\n", strings.Join(args, " "), err, out)
	return err
}

func (c *cell) mountAt(dir string) error {
	return c.quarry(append(append([]string{"mount"}, c.flags()...), matrixImage, dir)...)
}

func (c *cell) umount(dir string) error { return c.quarry("umount", "--worker-dir", c.worker, dir) }

// primed reads the image once, so that it is on the cache disk.
func (c *cell) primed() error {
	if err := c.mountAt(c.mount); err != nil {
		return err
	}
	if f := readKnown(c.mount, c.tree, nil); f.right != len(c.tree) {
		return fmt.Errorf("first read: %v", f)
	}
	if err := c.onDisk(); err != nil {
		return err
	}
	return c.umount(c.mount)
}

// mended ends the fault.
func (c *cell) mended() error {
	if c.mend == nil {
		return nil
	}
	return c.mend(c)
}

// whileWaiting returns what comes from done. A fault that is mended soon is
// mended when nothing has come for a while; waited says so.
func whileWaiting[T any](c *cell, done <-chan T) (came T, waited bool, err error) {
	if !c.soon {
		return <-done, false, nil
	}
	select {
	case came = <-done:
		return came, false, nil
	case <-time.After(patience):
	}
	if err := c.mended(); err != nil {
		return came, true, err
	}
	return <-done, true, nil
}

// reads is one pass over the tree during a fault.
func (c *cell) reads(each func(int)) (string, error) {
	done := make(chan found, 1)
	go func() { done <- readKnown(c.mount, c.tree, each) }() // ends with its reads
	got, waited, err := whileWaiting(c, done)
	if err != nil {
		return "", err
	}
	return judge(got, waited)
}

func judge(f found, waited bool) (string, error) {
	switch {
	case len(f.wrong) > 0:
		return wrong, nil
	case len(f.other) > 0:
		return "", fmt.Errorf("reads: %v", f)
	case f.eio > 0:
		return eio, nil
	case waited:
		return waits, nil
	}
	return right, nil
}

// after mends the fault and wants everything right: on this mount, or on another
// when this one was broken.
func (c *cell) after(during string) (string, error) {
	if during == wrong {
		return wrong, nil
	}
	if err := c.mended(); err != nil {
		return "", err
	}
	got, err := judge(readKnown(c.mount, c.tree, nil), false)
	switch {
	case err != nil || got == wrong:
		return got, err
	case got == right:
		return during, nil
	}
	if err := c.umount(c.mount); err != nil {
		return "", err
	}
	if err := c.mountAt(c.mount); err != nil {
		return "", err
	}
	if got, err := judge(readKnown(c.mount, c.tree, nil), false); got != right {
		return got, fmt.Errorf("reads of a new mount: %s, %w", got, err)
	}
	return remount, nil
}

func (c *cell) beforeMount() (string, error) {
	if c.alive {
		other := c.mount + ".other"
		if err := os.Mkdir(other, 0o700); err != nil {
			return "", err
		}
		if err := c.mountAt(other); err != nil {
			return "", err
		}
		defer c.umount(other)
	}
	if err := c.strike(c); err != nil {
		return "", err
	}
	if c.moves {
		c.tree = c.movedTree
	}
	mounted := make(chan error, 1)
	go func() { mounted <- c.mountAt(c.mount) }() // ends with the cell's time
	refusal, waited, err := whileWaiting(c, mounted)
	if err != nil {
		return "", err
	}
	if refusal == nil {
		during, err := c.reads(nil)
		if err != nil {
			return "", err
		}
		if waited && during == right {
			during = waits
		}
		return c.after(during)
	}
	if err := c.mended(); err != nil {
		return "", err
	}
	if err := c.mountAt(c.mount); err != nil {
		return "", err
	}
	if got, err := judge(readKnown(c.mount, c.tree, nil), false); got != right {
		return got, err
	}
	return refused, nil
}

func (c *cell) idle() (string, error) {
	if err := c.mountAt(c.mount); err != nil {
		return "", err
	}
	if err := c.strike(c); err != nil {
		return "", err
	}
	during, err := c.reads(nil)
	if err != nil {
		return "", err
	}
	return c.after(during)
}

func (c *cell) duringReads() (string, error) {
	if err := c.mountAt(c.mount); err != nil {
		return "", err
	}
	struck := make(chan error, 1)
	during, err := c.reads(func(n int) {
		if n == strikeAfter {
			struck <- c.strike(c)
		}
	})
	if err != nil {
		return "", err
	}
	if err := <-struck; err != nil {
		return "", err
	}
	return c.after(during)
}
