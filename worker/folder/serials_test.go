package folder_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/store/image"
	"quarry/worker/folder"
)

// serialFiles fetches once and returns the two files of serials.
func serialFiles(t *testing.T, p *published, w *folder.Images) (first, second string) {
	t.Helper()
	if _, err := p.fetch(t, w); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(w.Dir.Path(), "serials.json"), filepath.Join(w.Dir.Path(), "serials.copy.json")
}

// One damaged file of serials stops no fetch, lets the store go back to nothing, and is
// what it was afterwards.
func TestDamagedSerialsAreMendedByTheirCopy(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	first, second := serialFiles(t, p, w)
	whole, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	check := func(path string, what any) {
		t.Helper()
		p.serial = 6
		if _, err := p.fetch(t, w); !errors.Is(err, image.ErrRollback) {
			t.Errorf("%s: %v: serial 6 after 7: got %v, want ErrRollback", path, what, err)
		}
		p.serial = 7
		if _, err := p.fetch(t, w); err != nil {
			t.Errorf("%s: %v: %v", path, what, err)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, whole) {
			t.Fatalf("%s: %v: it is %q afterwards, error %v", path, what, got, err)
		}
	}
	for _, path := range []string{first, second} {
		for at := range whole {
			flip(t, path, at)
			check(path, at)
		}
		for what, damage := range map[string]func() error{
			"empty": func() error { return os.Truncate(path, 0) },
			"null":  func() error { return os.WriteFile(path, []byte("null"), 0o600) },
			"a folder": func() error {
				return errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "x"), 0o700))
			},
		} {
			if err := damage(); err != nil {
				t.Fatal(err)
			}
			check(path, what)
		}
	}
}

// Without a whole copy nothing is fetched, until somebody removes the file.
func TestDamagedSerialsStopFetches(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	first, second := serialFiles(t, p, w)
	if err := errors.Join(os.Truncate(first, 5), os.Truncate(second, 5)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.fetch(t, w); err == nil || !strings.Contains(err.Error(), "remove the file") || !strings.Contains(err.Error(), first) {
		t.Errorf("got %v", err)
	}
	p.serial = 6
	if err := os.Remove(first); err != nil {
		t.Fatal(err)
	}
	if _, err := p.fetch(t, w); err != nil {
		t.Errorf("without the file: %v", err)
	}
}

// The file of a version that kept no sum is read, and its serial is the highest.
func TestSerialsOfAnOlderVersion(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	first, second := serialFiles(t, p, w)
	old := `{"` + p.ref.Repo + ":" + p.ref.Tag + `":{"Serial":9,"Source":"` + p.statement.Source.String() + `"}}`
	if err := errors.Join(os.WriteFile(first, []byte(old), 0o600), os.Remove(second)); err != nil {
		t.Fatal(err)
	}
	p.serial = 8
	if _, err := p.fetch(t, w); !errors.Is(err, image.ErrRollback) {
		t.Errorf("serial 8 after 9: got %v, want ErrRollback", err)
	}
	p.serial = 10
	if _, err := p.fetch(t, w); err != nil {
		t.Error(err)
	}
}

// A folder in the place of a file of an image, or a file in the place of its folder, is
// in nobody's way.
func TestAFolderInTheirPlaceDoesNotKeepFilesAway(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 3, 1)
	n.fetch(t, img.Ref, img)
	d, id := n.images.Dir, n.ID(t, img)
	want := tree(t, d)
	dir := filepath.Join(d.Path(), "images", id.Hex())
	origin := n.images.Origin
	for _, path := range []string{dir + ".json", dir + "/statement", dir + "/config", dir + "/bootstrap", dir + "/origin.json", filepath.Join(d.Path(), "latest.json"), dir} {
		for what, heal := range map[string]func() error{
			"fetch": func() error { _, err := n.images.Fetch(t.Context(), img.Ref, image.HostPlatform()); return err },
			"repair": func() error {
				_, unsaved, err := d.Repair(t.Context(), id, origin, n.Client)
				return errors.Join(unsaved, err)
			},
		} {
			err := os.RemoveAll(path)
			if path == dir {
				err = errors.Join(err, os.WriteFile(path, []byte("x"), 0o600))
			} else {
				err = errors.Join(err, os.MkdirAll(filepath.Join(path, "x"), 0o700))
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := heal(); err != nil {
				t.Errorf("%s: %s: %v", path, what, err)
				continue
			}
			for name, got := range tree(t, d) {
				if got != want[name] {
					t.Errorf("%s: %s: %s is not what it was", path, what, name)
				}
			}
		}
	}
}
