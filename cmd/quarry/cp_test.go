package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// A link in the place of a folder leads nowhere, and the error names it.
func TestACopySaysWhichLinkIsInItsWay(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	if err := os.Symlink(out, filepath.Join(dir, "d")); err != nil {
		t.Fatal(err)
	}
	for _, h := range []tar.Header{{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "d/x/y", Typeflag: tar.TypeReg}, {Name: "d/x", Typeflag: tar.TypeReg}} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = unpack(root, &b, newBudget(1<<20), io.Discard)
		root.Close()
		if err == nil || !strings.HasPrefix(err.Error(), "d is a symlink") {
			t.Errorf("%s: %v", h.Name, err)
		}
		if all, err := os.ReadDir(out); err != nil || len(all) > 0 {
			t.Errorf("%s: %v came out, %v", h.Name, all, err)
		}
	}
}

// A copy that the worker cannot finish says what the worker does, not how the connection ended.
func TestACopyThatFailsInTheMiddleSaysWhy(t *testing.T) {
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 4}), w.Flush()); err == nil {
		t.Fatal("half a file is whole")
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/stat") {
			fmt.Fprint(w, `{"type":"directory"}`)
			return
		}
		w.Header().Set("Trailer", sandboxes.HeaderError)
		_, _ = w.Write(files.Bytes())
		w.Header().Set(sandboxes.HeaderError, `{"code":"file_stuck","message":"f: it changed while it was read"}`)
	}))
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	o := copyOptions{most: byteSize{bytes: 1 << 20}}
	err = o.copyOut(t.Context(), c, "s1", "/d", t.TempDir(), io.Discard, io.Discard)
	if !errors.Is(err, sandbox.ErrFileStuck) || !strings.HasSuffix(err.Error(), "it changed while it was read") {
		t.Error(err)
	}
}

// A time that would be none is refused, and is no timeout of ever.
func TestATimeoutIsNotRoundedToNone(t *testing.T) {
	for _, o := range []execOptions{{timeout: 10 * time.Microsecond}, {grace: 1}} {
		if err := o.fill(nil); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v", o, err)
		}
	}
}
