package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestABucketURLHasOneSpelling(t *testing.T) {
	for text, want := range map[string]bucketURL{
		"":                                       "",
		"file:///srv/b":                          "file:///srv/b",
		"file:///srv//x/..":                      "file:///srv",
		"file:///a%20b/":                         "file:///a%20b",
		"file:///a b":                            "file:///a%20b",
		"s3://bkt/p/?region=x&endpoint=http://h": "s3://bkt/p?endpoint=http%3A%2F%2Fh&region=x",
	} {
		if got, err := parseBucketURL(text); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
	for _, text := range []string{"/srv/b", "file://host/b", "file:b", "file://", "file:///b?x=1", "file:///b#x", "ftp://h/b", "%zz:", "file://u:secret@/b", "ftp://u:secret@h/b", "s3://u:secret@bkt"} {
		_, err := parseBucketURL(text)
		if !errors.Is(err, errUsage) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: got error %v, want one of usage without the password", text, err)
		}
	}
}

// A command that found another bucket than serve was given would begin a second
// store beside the first.
func TestADataFolderRemembersItsBucket(t *testing.T) {
	at := bucketURL("file://" + filepath.Join(t.TempDir(), "objects"))
	cfg := ownerConfig{dir: dataDir(t.TempDir()), bucket: place{url: at}, log: warnings(os.Stderr)}
	if made, err := cfg.dir.exists(); made || err != nil {
		t.Fatalf("an empty folder: %v, %v", made, err)
	}
	if err := openAndClose(t, cfg); err != nil {
		t.Fatal(err)
	}
	if made, err := cfg.dir.exists(); !made || err != nil {
		t.Errorf("the folder of a store: %v, %v", made, err)
	}
	for _, again := range []bucketURL{"", at} {
		cfg.bucket.url = again
		if err := openAndClose(t, cfg); err != nil {
			t.Errorf("bucket %q: %v", again, err)
		}
	}
	if _, err := os.Stat(filepath.Join(at.folder(cfg.dir), "store.json")); err != nil {
		t.Errorf("the store is not where --bucket said: %v", err)
	}
	if _, err := os.Stat(cfg.dir.bucket()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a bucket in the data folder: %v", err)
	}
	cfg.bucket.url = "file:///elsewhere"
	err := openAndClose(t, cfg)
	if err == nil || !strings.Contains(err.Error(), string(at)) || !strings.Contains(err.Error(), cfg.dir.bucketFile()) {
		t.Errorf("another URL: got error %v, want one that names %s and the file", err, at)
	}
}

// A URL that was mistyped is not in the way of the right one.
func TestABucketThatCannotBeOpenedIsNotRemembered(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, wrong := range map[string]place{
		"a file":             {url: bucketURL("file://" + file)},
		"a folder in a file": {url: bucketURL("file://" + file + "/below")},
	} {
		t.Run(name, func(t *testing.T) {
			right := bucketURL("file://" + filepath.Join(t.TempDir(), "objects"))
			cfg := ownerConfig{dir: dataDir(t.TempDir()), bucket: wrong, log: warnings(os.Stderr)}
			if err := openAndClose(t, cfg); err == nil {
				t.Fatal("it was opened")
			}
			if made, err := cfg.dir.exists(); made || err != nil {
				t.Errorf("a store was made: %t, %v", made, err)
			}
			cfg.bucket.url = right
			if err := openAndClose(t, cfg); err != nil {
				t.Errorf("with the right URL: %v", err)
			}
			// Nor does it replace what is remembered.
			cfg.bucket = wrong
			if err := openAndClose(t, cfg); err == nil {
				t.Error("another URL than before was taken")
			}
			cfg.bucket = place{}
			if err := openAndClose(t, cfg); err != nil {
				t.Errorf("as it was: %v", err)
			}
		})
	}
}

func TestADataFolderWithItsOwnBucketKeepsIt(t *testing.T) {
	cfg := ownerConfig{dir: dataDir(t.TempDir()), log: warnings(os.Stderr)}
	if err := openAndClose(t, cfg); err != nil {
		t.Fatal(err)
	}
	cfg.bucket.url = "file:///elsewhere"
	if err := openAndClose(t, cfg); err == nil || !strings.Contains(err.Error(), cfg.dir.bucket()) {
		t.Errorf("got error %v, want one that names %s", err, cfg.dir.bucket())
	}
}

func TestABucketFileThatIsNoneIsDamage(t *testing.T) {
	for _, text := range []string{"", "{}", `{"version":1,"url":""}`, `{"version":1,"url":"ftp://x"}`, `{"version":1,"url":"file:///b"} `, `{"version":2,"url":"file:///b"}`} {
		d := dataDir(t.TempDir())
		if err := os.WriteFile(d.bucketFile(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := openAndClose(t, ownerConfig{dir: d, log: warnings(os.Stderr)})
		if err == nil || !strings.Contains(err.Error(), d.bucketFile()) {
			t.Errorf("%q: got error %v, want one that names the file", text, err)
		}
	}
}

// The guard against a file system that is not mounted holds for every folder.
func TestABucketThatVanishedIsNotBegunAnew(t *testing.T) {
	for _, outside := range []bool{false, true} {
		cfg := ownerConfig{dir: dataDir(t.TempDir()), log: warnings(os.Stderr)}
		if outside {
			cfg.bucket.url = bucketURL("file://" + filepath.Join(t.TempDir(), "objects"))
		}
		if err := openAndClose(t, cfg); err != nil {
			t.Fatal(err)
		}
		gone := cfg.bucket.url.folder(cfg.dir)
		move(t, gone, gone+".away")
		if err := openAndClose(t, cfg); exitCode(err) != exitDamage || !strings.Contains(err.Error(), gone) {
			t.Errorf("without its folder: got %v, want damage that names %s", err, gone)
		}
		move(t, gone+".away", gone)
		if err := openAndClose(t, cfg); err != nil {
			t.Errorf("back again: %v", err)
		}
	}
}

func TestServeRefusesABucketURL(t *testing.T) {
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"serve", "--no-auth", "--listen", "127.0.0.1:0", "--data", filepath.Join(t.TempDir(), "d"), "--bucket", "here"}, nil, &bytes.Buffer{}, &stderr)
	if code != exitUsage || !strings.Contains(stderr.String(), "--bucket") {
		t.Errorf("exit code %d and %q", code, stderr.String())
	}
}
