package build

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"quarry/converter/oci"
)

// entries returns the names in a layer, with their type or link target.
func entries(t *testing.T, raw []byte) []string {
	t.Helper()
	var names []string
	r := tar.NewReader(bytes.NewReader(raw))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uname != "" || h.ModTime.Nanosecond() != 0 {
			t.Errorf("%s has the owner name %q and the time %v", h.Name, h.Uname, h.ModTime)
		}
		name := h.Name
		if h.Linkname != "" {
			name += " -> " + h.Linkname
		}
		names = append(names, name)
	}
}

func write(t *testing.T, root, name, body string) {
	t.Helper()
	path := filepath.Join(root, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(body), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// changed lets a ctime be seen to differ on kernels whose clock for it ticks
// only every 10 ms.
func changed(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
}

func TestLayerHasWhatChanged(t *testing.T) {
	root := t.TempDir()
	write(t, root, "d/kept", "1")
	write(t, root, "d/edited", "1")
	write(t, root, "gone/deep/file", "1")
	write(t, root, "lonely", "1")
	write(t, root, "mode", "1")
	changed(t, errors.Join(os.Link(filepath.Join(root, "lonely"), filepath.Join(root, "second")), os.Symlink("d/kept", filepath.Join(root, "sym"))))

	var first bytes.Buffer
	old, err := writeLayer(&first, root, snapshot{}, ByName)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"d/", "d/edited", "d/kept", "gone/", "gone/deep/", "gone/deep/file", "lonely", "mode", "second -> lonely", "sym -> d/kept"}
	if got := entries(t, first.Bytes()); !slices.Equal(got, want) {
		t.Errorf("first layer:\n got %q\nwant %q", got, want)
	}

	changed(t, nil)
	write(t, root, "d/edited", "2") // of the same length
	write(t, root, "d/new", "1")
	changed(t, errors.Join(os.RemoveAll(filepath.Join(root, "gone")), os.Remove(filepath.Join(root, "sym")), os.Chmod(filepath.Join(root, "mode"), 0o600)))
	var second bytes.Buffer
	next, err := writeLayer(&second, root, old, ByName)
	if err != nil {
		t.Fatal(err)
	}
	want = []string{"d/", "d/edited", "d/new", "mode", ".wh.gone", ".wh.sym"}
	if got := entries(t, second.Bytes()); !slices.Equal(got, want) {
		t.Errorf("second layer:\n got %q\nwant %q", got, want)
	}
	var third bytes.Buffer
	if _, err := writeLayer(&third, root, next, ByName); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, third.Bytes()); len(got) != 0 {
		t.Errorf("a layer without changes has %q", got)
	}
}

// Another order has the same entries, each folder before what is in it.
func TestOrdersOfALayer(t *testing.T) {
	root := t.TempDir()
	for _, name := range strings.Fields("z/a z/b m/x/y a b c q/1 q/2 q/3") {
		write(t, root, name, name)
	}
	var byName []string
	for _, order := range []Order{ByName, ByInode, ByWalk} {
		var b bytes.Buffer
		if _, err := writeLayer(&b, root, snapshot{}, order); err != nil {
			t.Fatal(err)
		}
		got := entries(t, b.Bytes())
		if order == ByName {
			byName = got
		}
		if !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(byName))) {
			t.Errorf("%s: other entries: %q", order, got)
		}
		for i, name := range got {
			if dir := filepath.Dir(strings.TrimSuffix(name, "/")); dir != "." && !slices.Contains(got[:i], dir+"/") {
				t.Errorf("%s: %s stands before its folder", order, name)
			}
		}
	}
}

// A published layout is an image; until then there is none, and a changed
// recipe makes it an old one.
func TestPublishedLayout(t *testing.T) {
	dir := t.TempDir()
	r := Recipe{Family: "f", N: 1, Order: ByName, Steps: []Step{{Script: "true"}}, Env: []string{path}, Cmd: []string{"sh"}}
	root, layout := filepath.Join(dir, "root"), filepath.Join(dir, r.Name())
	write(t, root, "a", "1")
	w, err := newWriter(layout + ".new")
	if err != nil {
		t.Fatal(err)
	}
	old, err := w.addLayer(root, snapshot{}, ByName)
	if err != nil {
		t.Fatal(err)
	}
	write(t, root, "b", "2")
	if _, err := w.addLayer(root, old, ByName); err != nil {
		t.Fatal(err)
	}
	if built(layout, r) {
		t.Error("an image that was not published counts as built")
	}
	if err := w.publish(layout, r, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if !built(layout, r) {
		t.Error("a published image does not count as built")
	}
	r.Steps[0].Script = "false"
	if built(layout, r) {
		t.Error("an image of another recipe counts as built")
	}
	im, err := oci.Open(t.Context(), "oci:"+layout+":latest", oci.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer im.Close()
	if len(im.Layers) != 2 || im.Layers[0].DiffID == im.Layers[1].DiffID {
		t.Errorf("the layout has the layers %+v", im.Layers)
	}
}

func TestOneBuildAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".lock")
	unlock, err := lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock(path); err == nil || !strings.Contains(err.Error(), "another make corpus") {
		t.Errorf("a second lock: %v", err)
	}
	unlock()
	again, err := lock(path)
	if err != nil {
		t.Fatal(err)
	}
	again()
}
