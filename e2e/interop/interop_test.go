// Package interop_test holds converted images against readers that others
// wrote: stock Nydus, erofs-utils, go-erofs and the kernel. What they show must
// be the tree that was converted, path by path, so that "RAFS v6" is no claim of
// ours alone.
package interop_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/api/client"
	"quarry/converter/tree"
	"quarry/e2e/lab"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := closeShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// shared is the one store that all tests read, made by the first that needs it.
var shared struct {
	once   sync.Once
	lab    *lab.Lab
	server *lab.Server
	images []*converted
}

func closeShared() error {
	var err error
	if shared.server != nil {
		err = shared.server.Stop()
	}
	if shared.lab != nil {
		err = errors.Join(err, shared.lab.Close())
	}
	return err
}

// converted is one image of the set, in the store and in memory.
type converted struct {
	name  string // of the subtest
	ref   string // in the store
	boot  []byte // the bootstrap, as the server gives it
	image *rafs.Image
	tree  chunk.Digest // as the signed statement says
}

// images returns the converted set: the Debian image and the odd ones.
func images(t *testing.T) []*converted {
	t.Helper()
	need.Root(t)
	debian := filepath.Join(os.Getenv("QUARRY_IMAGES"), "debian")
	if _, err := os.Stat(filepath.Join(debian, "index.json")); err != nil {
		need.Missing(t, "the Debian image (make images makes it)")
	}
	shared.once.Do(func() { shared.images = convertAll(t, "oci:"+debian) })
	if len(shared.images) == 0 {
		t.Fatal("the images were not converted, as the first test to need them says")
	}
	return shared.images
}

func convertAll(t *testing.T, debian string) []*converted {
	t.Helper()
	var err error
	if shared.lab, err = lab.New(); err != nil {
		t.Fatal(err)
	}
	data := shared.lab.Path("data")
	if shared.server, err = shared.lab.Serve(context.Background(), data); err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{"debian": debian}
	for _, set := range []map[string]*testimage.Layout{oddImages(t), largeImages(t)} {
		for name, layers := range set {
			sources[name] = layers.Source("")
		}
	}
	var all []*converted
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		source := sources[name]
		ref := "t/" + name
		if _, err := shared.lab.Convert(context.Background(), data, source, ref); err != nil {
			t.Fatalf("convert the image %q: %v", name, err)
		}
		all = append(all, read(t, data, name, ref))
	}
	return all
}

// read fetches statement and bootstrap as any client of the server does.
func read(t *testing.T, data, name, ref string) *converted {
	t.Helper()
	ctx := context.Background()
	c, err := client.New(client.Config{URL: shared.server.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	trust, err := signer.LoadTrust(filepath.Join(data, "keys", "signing.pub"))
	if err != nil {
		t.Fatal(err)
	}
	want := image.Want{Platform: image.HostPlatform(), Trust: trust}
	if want.Ref, err = image.ParseRef(ref); err != nil {
		t.Fatal(err)
	}
	doc, err := c.Image(ctx, want.Ref, want.Platform)
	if err != nil {
		t.Fatal(err)
	}
	v, err := image.Verify(doc.Image, doc.Name, want)
	if err != nil {
		t.Fatal(err)
	}
	cv := &converted{name: name, ref: ref, tree: v.Statement.Tree}
	if cv.boot, err = c.Bootstrap(ctx, v.Statement.Bootstrap, v.Statement.BootstrapSize); err != nil {
		t.Fatal(err)
	}
	if cv.image, err = rafs.Decode(cv.boot); err != nil {
		t.Fatal(err)
	}
	if got := tree.Digest(cv.image.Tree); got != cv.tree {
		t.Fatalf("bootstrap of %s has the tree digest %s, the statement says %s", ref, got, cv.tree)
	}
	return cv
}

func (cv *converted) hasData() bool { return cv.image.Blob != nil }

// writeBoot writes the bootstrap to a file of the test.
func (cv *converted) writeBoot(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.boot")
	if err := os.WriteFile(path, cv.boot, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// blobURL is where the server has the image's virtual blob.
func (cv *converted) blobURL() string {
	return shared.server.URL + "/v1/blobs/" + cv.image.Blob.ID.Hex()
}

// writeBlob downloads the virtual blob, whole, into a folder under its id.
func (cv *converted) writeBlob(t *testing.T) (folder string) {
	t.Helper()
	folder = t.TempDir()
	if !cv.hasData() {
		return folder
	}
	resp, err := http.Get(cv.blobURL())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	f, err := os.Create(filepath.Join(folder, cv.image.Blob.ID.Hex()))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, err := io.Copy(f, resp.Body); err != nil || resp.StatusCode != http.StatusOK || n != cv.image.Blob.Size() {
		t.Fatalf("GET %s: %s, %d of %d bytes, %v", cv.blobURL(), resp.Status, n, cv.image.Blob.Size(), err)
	}
	return folder
}

// writeDevice lays the chunks of the virtual blob out as the data device that
// EROFS readers want, and returns its path; "" when the image has no data.
func (cv *converted) writeDevice(t *testing.T) string {
	t.Helper()
	if !cv.hasData() {
		return ""
	}
	blob, err := os.Open(filepath.Join(cv.writeBlob(t), cv.image.Blob.ID.Hex()))
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	dev, err := os.Create(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if err := dev.Truncate(cv.image.Blob.DevSize()); err != nil {
		t.Fatal(err)
	}
	for _, c := range cv.image.Blob.Chunks {
		p := make([]byte, c.Len)
		if _, err := blob.ReadAt(p, c.Off); err != nil {
			t.Fatal(err)
		}
		if _, err := dev.WriteAt(p, c.DevOff); err != nil {
			t.Fatal(err)
		}
	}
	return dev.Name()
}

// entry is what a reader says of one path, in a form that can be compared and
// printed.
type entry struct {
	mode, uid, gid uint32
	mtime          int64
	nsec           uint32
	rdev           uint32
	size           int64
	target         string
	xattrs         string
	content        string // digest over the digests of the chunks
	linkTo         string // the first path of the same file; then nothing else is set
}

// listTree says of every path of a tree what it is.
func listTree(t *testing.T, tr *rafs.Tree) map[string]entry {
	t.Helper()
	list, first := map[string]entry{}, map[*rafs.Inode]string{}
	err := tr.Walk(func(path string, n *rafs.Inode) error {
		if seen, ok := first[n]; ok {
			list[path] = entry{linkTo: seen}
			return nil
		}
		first[n] = path
		list[path] = entryOf(n)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func entryOf(n *rafs.Inode) entry {
	e := entry{mode: n.Mode, uid: n.UID, gid: n.GID, mtime: n.Mtime, nsec: n.MtimeNsec, rdev: n.Rdev, size: n.Size, target: n.Target}
	var xattrs strings.Builder
	for _, x := range n.Xattrs {
		fmt.Fprintf(&xattrs, "%q=%s ", x.Name, chunk.Sum(x.Value).Hex()[:16])
	}
	e.xattrs = xattrs.String()
	var digests []byte
	for _, d := range n.Chunks {
		digests = append(digests, d[:]...)
	}
	e.content = chunk.Sum(digests).Hex()
	return e
}

// compare reports every path at which a reader shows something else than was
// converted. tame evens out what a reader is known to show in its own way; nil:
// it shows everything as it is.
func compare(t *testing.T, got, want map[string]entry, tame func(path string, got, want *entry)) {
	t.Helper()
	bad := 0
	report := func(format string, args ...any) {
		const enough = 20
		if bad++; bad <= enough {
			t.Errorf(format, args...)
		}
	}
	for path, w := range want {
		g, ok := got[path]
		if !ok {
			report("%q is missing", path)
			continue
		}
		if tame != nil {
			tame(path, &g, &w)
		}
		if g != w {
			report("%q:\n got %+v\nwant %+v", path, g, w)
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			report("%q is there and should not be", path)
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d paths differ", bad, len(want))
	}
}

// withoutLinks makes every hard link a file of its own, for readers that copy.
func withoutLinks(list map[string]entry) map[string]entry {
	for path, e := range list {
		if e.linkTo != "" {
			list[path] = list[e.linkTo]
		}
	}
	return list
}

// listDir reads a folder on disk as listTree reads a tree.
func (cv *converted) listDir(t *testing.T, dir string) map[string]entry {
	t.Helper()
	return listTree(t, cv.readDir(t, dir))
}

func (cv *converted) readDir(t *testing.T, dir string) *rafs.Tree {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	tr, err := tree.FromDir(ctx, dir, cv.image.Tree.ChunkSize)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}
