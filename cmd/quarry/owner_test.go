package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/signer"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

func openAndClose(t *testing.T, cfg ownerConfig) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	o, err := openOwner(ctx, cfg)
	if err == nil {
		err = o.close()
	}
	return err
}

// An image that its own data folder does not trust must not be made.
func TestAnOwnerSignsWithAKeyThatItsFolderTrusts(t *testing.T) {
	cfg := ownerConfig{dir: dataDir(t.TempDir()), log: warnings(os.Stderr)}
	if err := openAndClose(t, cfg); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(cfg.dir.signingPub()); err != nil {
		t.Fatal(err)
	}
	if err := openAndClose(t, cfg); err != nil {
		t.Errorf("without the public half: %v", err)
	}
	if _, err := os.Stat(cfg.dir.signingPub()); err != nil {
		t.Errorf("the public half was not made again: %v", err)
	}

	other := filepath.Join(t.TempDir(), "other")
	if err := runKeygen(other, &bytes.Buffer{}); err != nil {
		t.Fatal(err)
	}
	withKey := cfg
	withKey.keyFile = other
	if err := openAndClose(t, withKey); err == nil || !strings.Contains(err.Error(), other+".pub") {
		t.Errorf("--key without its public half in the folder: %v", err)
	}
	move(t, other+".pub", filepath.Join(cfg.dir.keys(), "other.pub"))
	if err := openAndClose(t, withKey); err != nil {
		t.Errorf("--key with its public half in the folder: %v", err)
	}
	if err := os.Remove(filepath.Join(cfg.dir.keys(), "other.pub")); err != nil {
		t.Fatal(err)
	}
	move(t, other, cfg.dir.signingKey())
	if err := openAndClose(t, cfg); err == nil || !strings.Contains(err.Error(), cfg.dir.signingPub()) {
		t.Errorf("a signing key that was replaced: %v", err)
	}
	unsigned := cfg
	unsigned.noSign = true
	if err := openAndClose(t, unsigned); err != nil {
		t.Errorf("without signing: %v", err)
	}
}

// A data folder that is made anew over the bucket of another makes a key of its own, and
// nothing would be wrong but that no worker takes what it signs.
func TestAnotherSigningKeyThanTheBucketsIsSaid(t *testing.T) {
	at := place{url: bucketURL("file://" + filepath.Join(t.TempDir(), "objects"))}
	var log bytes.Buffer
	cfg := ownerConfig{dir: dataDir(t.TempDir()), bucket: at, log: warnings(&log), takeover: time.Millisecond}
	said := func(want bool, what string) {
		t.Helper()
		log.Reset()
		if err := openAndClose(t, cfg); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "signing.pub of the backup"); got != want {
			t.Errorf("%s: said %t, want %t: %s", what, got, want, log.String())
		}
	}
	said(false, "an empty store")
	o, err := openOwner(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	n := catalog.Name{Repo: "t/x", Tag: "v1", Source: chunk.Sum(nil), Serial: 1}
	payload, err := image.EncodeNameStatement(image.NameStatement{Repo: n.Repo, Tag: n.Tag, Source: n.Source, Serial: n.Serial, Issued: time.Unix(1e9, 0).UTC()})
	if err != nil {
		t.Fatal(err)
	}
	n.Statement, err = signer.Envelope{
		PayloadType: image.NameStatementType, Payload: payload,
		Signatures: []signer.Signature{signer.Sign(o.signing, image.NameStatementType, payload)},
	}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(o.catalog.SetName(t.Context(), n), o.close()); err != nil {
		t.Fatal(err)
	}
	said(false, "its own key")

	backup := cfg.dir.keys()
	cfg.dir = dataDir(t.TempDir())
	said(true, "a new folder")
	said(true, "a new folder, started again")
	if err := os.RemoveAll(cfg.dir.keys()); err != nil {
		t.Fatal(err)
	}
	move(t, backup, cfg.dir.keys())
	said(false, "with the keys of the backup")
}

// A damaged key file is damage, and the error names the file and what to do.
func TestADamagedFileOfTheFolderIsNamed(t *testing.T) {
	for name, file := range map[string]func(dataDir) string{
		"store.json":    func(d dataDir) string { return filepath.Join(d.bucket(), "store.json") },
		"signing.key":   dataDir.signingKey,
		"signing.pub":   dataDir.signingPub,
		"converter.key": dataDir.converterKey,
	} {
		cfg := ownerConfig{dir: dataDir(t.TempDir()), log: warnings(os.Stderr)}
		if err := openAndClose(t, cfg); err != nil {
			t.Fatal(err)
		}
		for _, size := range []int64{10, 0} {
			if err := os.Truncate(file(cfg.dir), size); err != nil {
				t.Fatal(err)
			}
			err := openAndClose(t, cfg)
			if exitCode(err) != exitDamage || !strings.Contains(err.Error(), file(cfg.dir)) || !strings.Contains(err.Error(), "remove") {
				t.Errorf("%s of %d bytes: got %v, want damage that names the file and what to do", name, size, err)
			}
		}
	}
}

func move(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func TestAFolderThatCannotBeWrittenIsNamed(t *testing.T) {
	for _, err := range []error{fs.ErrPermission, &fs.PathError{Op: "mkdir", Path: "/d", Err: os.ErrPermission}} {
		if got := dataDir("/d").wrap(err).Error(); !strings.Contains(got, "/d") || !strings.Contains(got, "must be writable") {
			t.Errorf("%v: got %q", err, got)
		}
	}
}
