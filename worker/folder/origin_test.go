package folder_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

// flip changes one bit of a file.
func flip(t *testing.T, path string, at int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[at%len(b)] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// tree reads every file below the images of a folder.
func tree(t *testing.T, d folder.Dir) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := fs.WalkDir(os.DirFS(filepath.Join(d.Path(), "images")), ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(filepath.Join(d.Path(), "images", path))
		files[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// Whatever one thing befalls an image's files, the folder knows enough to have them
// again from the image's origin, and what it has then is what it had.
func TestADamagedImageIsRepairedFromItsOrigin(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 30, 1)
	n.fetch(t, img.Ref, img)
	d, id := n.images.Dir, n.ID(t, img)
	want := tree(t, d)
	dir := filepath.Join(d.Path(), "images", id.Hex())
	truncate := func(names ...string) error {
		var errs []error
		for _, name := range names {
			errs = append(errs, os.Truncate(filepath.Join(dir, name), 0))
		}
		return errors.Join(errs...)
	}
	damages := map[string]func() error{
		"no folder":   func() error { return os.RemoveAll(dir) },
		"empty files": func() error { return truncate("statement", "config", "bootstrap", "origin.json") },
		"an empty statement and one origin": func() error {
			return errors.Join(truncate("statement"), os.Remove(dir+".json"))
		},
	}
	for _, name := range []string{"statement", "config", "bootstrap"} {
		path := filepath.Join(dir, name)
		damages["flipped "+name] = func() error { flip(t, path, 1000); return nil }
		damages["short "+name] = func() error { return os.Truncate(path, 1) }
		damages["no "+name] = func() error { return os.Remove(path) }
	}
	for what, damage := range damages {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Load(id); err == nil {
			t.Errorf("%s: the image is loaded", what)
		}
		o, err := d.Origin(id)
		if err != nil || !slices.Equal(o.Stores, n.images.Origin.Stores) {
			t.Errorf("%s: origin %+v, error %v", what, o, err)
		}
		im, unsaved, err := d.Repair(t.Context(), id, o, n.Client)
		if err != nil || unsaved != nil {
			t.Errorf("%s: repair: %v, %v", what, err, unsaved)
			continue
		}
		if string(im.Bootstrap) != string(img.Bootstrap) || string(im.Config) != string(img.Config) {
			t.Errorf("%s: another image", what)
		}
		for name, got := range tree(t, d) {
			if got != want[name] {
				t.Errorf("%s: %s is not what it was", what, name)
			}
		}
		if _, err := d.Load(id); err != nil {
			t.Errorf("%s: after the repair: %v", what, err)
		}
	}
}

// A flipped bit in where an image came from is no other place.
func TestADamagedOriginIsNotBelieved(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 1, 1)
	n.fetch(t, img.Ref, img)
	d, id := n.images.Dir, n.ID(t, img)
	first := filepath.Join(d.Path(), "images", id.Hex(), "origin.json")
	second := filepath.Join(d.Path(), "images", id.Hex()+".json")
	whole, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{first, second} {
		for at := range whole {
			flip(t, path, at)
			if o, err := d.Origin(id); err != nil || !slices.Equal(o.Stores, n.images.Origin.Stores) {
				t.Fatalf("bit flipped at %d: %+v, %v", at, o, err)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, whole) {
				t.Fatalf("bit flipped at %d: %s is not mended by the other copy; error %v", at, path, err)
			}
		}
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	for at := range whole {
		flip(t, first, at)
		if o, err := d.Origin(id); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("the only copy, bit flipped at %d: %+v, %v", at, o, err)
		}
		flip(t, first, at)
	}
	if err := os.Remove(first); err != nil {
		t.Fatal(err)
	}
	if o, err := d.Origin(id); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no copy: %+v, %v", o, err)
	}
	// One of a version that kept no statement.
	if err := os.WriteFile(first, []byte(`{"stores":["http://a"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if o, err := d.Origin(id); err != nil || len(o.Stores) != 1 || o.Stores[0] != "http://a" {
		t.Errorf("an old one: %+v, %v", o, err)
	}
}

func TestWhatWasNeverHereIsNotRepaired(t *testing.T) {
	n := newNode(t)
	if _, _, err := n.images.Dir.Repair(t.Context(), chunk.Sum([]byte("x")), n.images.Origin, n.Client); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// away is a source that does not answer.
type away struct{}

var errAway = errors.New("no answer")

func (away) Bootstrap(context.Context, chunk.Digest, int64) ([]byte, error) { return nil, errAway }
func (away) Config(context.Context, chunk.Digest) ([]byte, error)           { return nil, errAway }

// What the source said of a repair, another attempt may change; what the folder has,
// it does not: here an image whose bootstrap is intact, and none that is known.
func TestARepairSaysWhetherTheSourceFailed(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 3, 1)
	n.fetch(t, img.Ref, img)
	d, id := n.images.Dir, n.ID(t, img)
	dir := filepath.Join(d.Path(), "images", id.Hex())
	for _, name := range []string{"config", "bootstrap"} {
		flip(t, filepath.Join(dir, name), 1000)
		if _, _, err := d.Repair(t.Context(), id, n.images.Origin, away{}); !errors.Is(err, folder.ErrFetch) || !errors.Is(err, errAway) {
			t.Errorf("%s: got %v, want an ErrFetch", name, err)
		}
		flip(t, filepath.Join(dir, name), 1000)
	}
	payload, err := os.ReadFile(filepath.Join(dir, "statement"))
	if err != nil {
		t.Fatal(err)
	}
	st, err := image.DecodeStatement(payload)
	if err != nil {
		t.Fatal(err)
	}
	boot := []byte("of a later version")
	st.Bootstrap, st.BootstrapSize = chunk.Sum(boot), int64(len(boot))
	if payload, err = image.EncodeStatement(st); err != nil {
		t.Fatal(err)
	}
	later := filepath.Join(d.Path(), "images", image.ID(payload).Hex())
	if err := os.CopyFS(later, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string][]byte{"statement": payload, "bootstrap": boot} {
		if err := os.WriteFile(filepath.Join(later, name), p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := d.Repair(t.Context(), image.ID(payload), n.images.Origin, away{}); err == nil || errors.Is(err, folder.ErrFetch) {
		t.Errorf("of a later version: got %v", err)
	}
}
