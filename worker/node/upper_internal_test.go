package node

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestTheWritableLayerBeginsWithWhatTheImageLacks(t *testing.T) {
	root := t.TempDir()
	etc := filepath.Join(root, "etc")
	if err := errors.Join(os.Mkdir(etc, 0o751), os.Chown(etc, 7, 8), os.Chtimes(etc, time.Time{}, time.Unix(1000, 5))); err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{hostsFile: []byte(hosts("h")), resolvConf: []byte("nameserver 1.2.3.4\n")}
	at := time.Unix(2000, 0)
	raw := upperOf(t, root, files, at)
	got := map[string]tar.Header{}
	r := tar.NewReader(bytes.NewReader(raw))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if want := files[h.Name[1:]]; err != nil || !bytes.Equal(text, want) {
			t.Errorf("%s has %q, error %v, want %q", h.Name, text, err, want)
		}
		got[h.Name] = *h
	}
	if len(got) != 4 || got["./"].Typeflag != tar.TypeDir {
		t.Errorf("there are %v", got)
	}
	if h := got["./etc/"]; h.Typeflag != tar.TypeDir || h.Mode != 0o751 || h.Uid != 7 || h.Gid != 8 || !h.ModTime.Equal(time.Unix(1000, 5)) {
		t.Errorf("/etc is not as in the image: %+v", h)
	}
	if h := got["./etc/hosts"]; h.Mode != 0o644 || h.Uid != 0 || !h.ModTime.Equal(at) {
		t.Errorf("hosts: %+v", h)
	}
	if upperOf(t, root, nil, at) != nil {
		t.Error("there is a layer without a file")
	}
}

func TestAFolderThatATarCannotSayIsLeftAlone(t *testing.T) {
	files := map[string][]byte{hostsFile: []byte("x")}
	root := t.TempDir()
	if upperOf(t, root, files, time.Time{}) != nil {
		t.Error("there is no /etc")
	}
	if err := errors.Join(os.Mkdir(filepath.Join(root, "real"), 0o755), os.Symlink("real", filepath.Join(root, "etc"))); err != nil {
		t.Fatal(err)
	}
	if upperOf(t, root, files, time.Time{}) != nil {
		t.Error("/etc is a link, which a folder would hide")
	}
	etc := filepath.Join(root, "etc")
	if err := errors.Join(os.Remove(etc), os.Mkdir(etc, 0o755)); err != nil {
		t.Fatal(err)
	}
	if upperOf(t, root, files, time.Time{}) == nil {
		t.Error("a plain /etc is not taken")
	}
	if err := unix.Setxattr(etc, "user.a", []byte("b"), 0); err != nil {
		t.Logf("no xattrs here: %v", err)
	} else if upperOf(t, root, files, time.Time{}) != nil {
		t.Error("the xattrs of /etc are lost")
	}
}

func upperOf(t *testing.T, root string, files map[string][]byte, at time.Time) []byte {
	t.Helper()
	top, err := find(t.Context(), root, "/", false)
	if err != nil {
		t.Fatal(err)
	}
	etc, err := find(t.Context(), root, "/etc", false)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := upperLayer(top, etc, files, at)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestWhatIsInAnImage(t *testing.T) {
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	if err := errors.Join(os.WriteFile(at("empty"), nil, 0o600), os.WriteFile(at("full"), []byte("x"), 0o600), os.Mkdir(at("dir"), 0o700),
		os.Symlink("/empty", at("link")), os.Symlink("/none", at("dangling")), os.Symlink("../../full", at("dir/up"))); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]struct{ bare, file, folder bool }{
		"/empty": {bare: true, file: true}, "/full": {file: true}, "/dir": {folder: true}, "/link": {bare: true}, "/dangling": {bare: true},
		"/none": {bare: true}, "/full/x": {}, "/dir/up": {}, "/none/x": {bare: true},
	} {
		p, err := find(t.Context(), root, path, true)
		if err != nil || p.bare() != want.bare {
			t.Errorf("%s: bare %t, error %v", path, p.bare(), err)
		}
		file, err1 := canBind(t.Context(), root, path, false)
		folder, err2 := canBind(t.Context(), root, path, true)
		if file != want.file || folder != want.folder || err1 != nil || err2 != nil {
			t.Errorf("%s: a file %t, a folder %t, errors %v, %v", path, file, folder, err1, err2)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := find(ctx, root, "/", false); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
