package main

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/store/catalog"
	"quarry/store/writer"
)

// A copy of a data folder is another folder: who has its lock says nothing of the
// process that has the first one's.
func TestTheIDOfAFolderIsItsOwn(t *testing.T) {
	base := t.TempDir()
	first := dataDir(filepath.Join(base, "a"))
	o, err := lockOwner(ownerConfig{dir: first, log: warnings(os.Stderr)})
	if err != nil {
		t.Fatal(err)
	}
	defer o.close()
	id := func(d dataDir) string {
		t.Helper()
		id, err := d.id()
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	was := id(first)
	if again := id(first); again != was {
		t.Errorf("id is %s, and then %s", was, again)
	}
	if out, err := exec.Command("cp", "-a", string(first), filepath.Join(base, "b")).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
	if other := id(dataDir(filepath.Join(base, "b"))); other == was {
		t.Error("a copy of the folder has its id")
	}
}

func TestAFolderRemembersThatItOnlyReads(t *testing.T) {
	d := dataDir(t.TempDir())
	choose := func(asked, background, want bool) {
		t.Helper()
		if got, err := d.chooseReadOnly(asked, background); err != nil || got != want {
			t.Errorf("asked %t, background %t: got %t, %v, want %t", asked, background, got, err, want)
		}
	}
	choose(false, false, false)
	choose(true, false, true)
	choose(false, true, false) // asking alone is remembered by who has the lock
	if err := d.rememberReadOnly(); err != nil {
		t.Fatal(err)
	}
	choose(true, false, true)
	choose(false, true, true)
	if _, err := d.chooseReadOnly(false, false); err == nil {
		t.Error("a node that only reads became a writer without being told to")
	}
}

// A command that starts the server of a folder by itself makes no key where somebody
// has said that nothing is signed.
func TestAFolderRemembersThatNothingIsSigned(t *testing.T) {
	cfg := ownerConfig{dir: dataDir(t.TempDir()), log: warnings(os.Stderr)}
	open := func(noSign, background bool) error {
		c := cfg
		c.noSign, c.background = noSign, background
		return openAndClose(t, c)
	}
	for _, background := range []bool{false, true, true} {
		if err := open(!background, background); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(cfg.dir.signingKey()); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("in the background %t: there is a signing key: %v", background, err)
		}
	}
	if err := open(false, false); err == nil || !strings.Contains(err.Error(), cfg.dir.noSignFile()) {
		t.Errorf("without --no-sign: error %v", err)
	}
	if err := os.Remove(cfg.dir.noSignFile()); err != nil {
		t.Fatal(err)
	}
	if err := open(false, true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cfg.dir.signingKey()); err != nil {
		t.Error(err)
	}
}

func TestAReadOnlyNodeNeedsToKnowItsBucket(t *testing.T) {
	d := filepath.Join(t.TempDir(), "d")
	err := runServe(t.Context(), serveOptions{data: d, doors: doors{noAuth: true, listen: "127.0.0.1:0"}, readOnly: true, takeover: minTakeover, maxConnections: 1}, os.Stderr, os.Stderr)
	if !errors.Is(err, errUsage) {
		t.Errorf("without --bucket: got error %v, want one of usage", err)
	}
	if _, err := os.Stat(d); err == nil {
		t.Error("the folder was made")
	}
}

// The mark of a writer is there before it has opened the index: that may take longer
// than others wait.
func TestTheMarkIsKeptWhileTheStoreIsOpened(t *testing.T) {
	cfg := ownerConfig{dir: dataDir(t.TempDir()), log: warnings(os.Stderr)}
	o, err := lockOwner(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer o.close()
	if err := errors.Join(o.openBucket(t.Context(), cfg), o.openCatalog(t.Context(), cfg)); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		m, err := writer.Read(t.Context(), o.bucket)
		if err == nil && m.Writer == o.self.ID && !m.Released {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the mark is %+v, error %v", m, err)
		}
	}
}

// What a writer does beside requests ends when another one has taken the store over, and
// not only when the process does.
func TestTheWorkOfAWriterEndsWhenItIsFenced(t *testing.T) {
	o, err := openOwner(t.Context(), ownerConfig{
		dir: dataDir(t.TempDir()), log: warnings(os.Stderr), gcEvery: time.Millisecond,
		jobs: jobOptions{conversions: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer o.close()
	stop := o.start(t.Context())
	defer stop()
	ended := make(chan struct{})
	go func() { // ends with o.start's work
		defer close(ended)
		o.working.Wait()
	}()
	// While this is the writer the work goes on, and that of gc has begun.
	figures := prometheus.NewRegistry()
	figures.MustRegister(o.upkeep.gc.Metrics().Collectors()...)
	collected := false
	for end := time.Now().Add(time.Minute); !collected; time.Sleep(time.Millisecond) {
		families, err := figures.Gather()
		if err != nil || time.Now().After(end) {
			t.Fatalf("nothing was collected, error %v", err)
		}
		for _, f := range families {
			collected = collected || f.GetName() == "quarry_gc_runs_total"
		}
	}
	other := writer.New(strings.Repeat("b", 32))
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: o.bucket, Writer: &other})
	if err == nil {
		err = c.Claim(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := o.catalog.Confirm(t.Context()); !errors.Is(err, catalog.ErrFenced) {
		t.Fatalf("got error %v, want %v", err, catalog.ErrFenced)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the work goes on")
	}
}

// A node that cannot serve must not take the store over: it would find out only when the
// writer is gone.
func TestANodeThatCannotServeBeginsNothing(t *testing.T) {
	d := filepath.Join(t.TempDir(), "d")
	cert := filepath.Join(t.TempDir(), "cert.pem")
	if err := os.WriteFile(cert, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, doors := range []doors{
		{noAuth: true, listen: "127.0.0.1:0", cert: cert, key: cert},
		{noAuth: true, listen: "127.0.0.1:0", cert: cert + ".gone", key: cert},
	} {
		err := runServe(t.Context(), serveOptions{data: d, doors: doors, takeover: minTakeover, maxConnections: 1}, os.Stderr, os.Stderr)
		if err == nil || !strings.Contains(err.Error(), "--tls-cert") {
			t.Errorf("serve with certificate %s: %v, want an error that names it", doors.cert, err)
		}
	}
	if _, err := os.Stat(filepath.Join(d, "bucket")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a store was made: %v", err)
	}
}
