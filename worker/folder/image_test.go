package folder_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

// published is a store with one name, as a worker sees it. The fields can be
// changed to make it lie.
type published struct {
	key       *signer.Key
	ref       image.Ref
	statement image.Statement
	boot      []byte
	config    []byte
	serial    uint64

	silent   bool   // content is left out whatever the worker has
	verified func() // called before content is sent; nil for nothing

	mu         sync.Mutex // guards the counters
	starts     int
	bootstraps int
}

func publish(t *testing.T) *published {
	t.Helper()
	key, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	file := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: 5, Chunks: []chunk.Digest{chunk.Sum([]byte("hello"))}}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{{Name: "file", Inode: file}}}
	boot, err := rafs.Encode(&rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root})
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	config := []byte(`{"architecture":"amd64","os":"linux"}`)
	return &published{
		key: key, ref: image.Ref{Repo: "team/task", Tag: "v1"}, serial: 7, boot: boot, config: config,
		statement: image.Statement{
			Source: chunk.Sum([]byte("manifest")), Platform: image.HostPlatform(), Config: chunk.Sum(config),
			Bootstrap: chunk.Sum(boot), BootstrapSize: int64(len(boot)), Blob: &im.Blob.ID,
			Tree: chunk.Sum([]byte("tree")), ChunkSize: chunk.DefaultSize, Converter: "test/1",
		},
	}
}

func (p *published) seal(kind string, payload []byte, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return signer.Envelope{PayloadType: kind, Payload: payload, Signatures: []signer.Signature{signer.Sign(p.key, kind, payload)}}.Encode()
}

func (p *published) Start(_ context.Context, ref image.Ref, _ image.Platform, have *chunk.Digest, _ bool,
	verify func(name, statement []byte) (*image.Verified, error),
) (config, bootstrap []byte, rest io.ReadCloser, err error) {
	name, statement, err := p.envelopes(ref)
	if err != nil {
		return nil, nil, nil, err
	}
	v, err := verify(name, statement)
	if err != nil {
		return nil, nil, nil, err
	}
	if p.verified != nil {
		p.verified()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starts++
	if p.silent || have != nil && *have == v.ID {
		return nil, nil, nil, nil
	}
	p.bootstraps++
	return p.config, p.boot, nil, nil
}

func (p *published) envelopes(ref image.Ref) (name, statement []byte, err error) {
	payload, err := image.EncodeStatement(p.statement)
	if statement, err = p.seal(image.StatementType, payload, err); err != nil || ref.Digest != nil {
		return nil, statement, err
	}
	payload, err = image.EncodeNameStatement(image.NameStatement{
		Repo: p.ref.Repo, Tag: p.ref.Tag, Source: p.statement.Source, Serial: p.serial, Issued: time.Unix(1_700_000_000, 0),
	})
	name, err = p.seal(image.NameStatementType, payload, err)
	return name, statement, err
}

// worker returns a worker folder that trusts the publisher's key.
func (p *published) worker(t *testing.T) *folder.Images {
	t.Helper()
	d, err := folder.Open(shortDir(t))
	if err != nil {
		t.Fatal(err)
	}
	return &folder.Images{
		Dir: d, Source: p, Origin: folder.Origin{Stores: []string{"http://store"}},
		Trust: signer.NewTrust(p.key.Public()), Log: slog.New(slog.DiscardHandler),
	}
}

func (p *published) fetch(t *testing.T, w *folder.Images) (*folder.Image, error) {
	t.Helper()
	return w.Fetch(t.Context(), p.ref, image.HostPlatform())
}

func TestAnImageIsFetchedOnce(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	for range 3 {
		im, err := p.fetch(t, w)
		if err != nil {
			t.Fatal(err)
		}
		if im.RAFS.FileBytes() != 5 || string(im.Config) != string(p.config) {
			t.Errorf("got %d file bytes and config %q", im.RAFS.FileBytes(), im.Config)
		}
	}
	if p.bootstraps != 1 || p.starts != 3 {
		t.Errorf("the bootstrap was sent in %d of %d answers, want one of 3", p.bootstraps, p.starts)
	}
}

func TestADamagedLocalCopyIsFetchedAgain(t *testing.T) {
	for _, part := range []string{"statement", "config", "bootstrap"} {
		for name, damage := range map[string]func([]byte) []byte{
			"a flipped byte":  func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
			"a missing end":   func(b []byte) []byte { return b[:len(b)-1] },
			"an empty file":   func([]byte) []byte { return nil },
			"one byte too m.": func(b []byte) []byte { return append(b, 0) },
		} {
			p := publish(t)
			w := p.worker(t)
			im, err := p.fetch(t, w)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(w.Dir.Path(), "images", im.ID.Hex(), part)
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, damage(raw), 0o600); err != nil {
				t.Fatal(err)
			}
			again, err := p.fetch(t, w)
			if err != nil || again.ID != im.ID || p.bootstraps != 2 {
				t.Errorf("%s with %s: got %v, %v after %d fetches", part, name, again, err, p.bootstraps)
			}
		}
	}
}

func TestALyingStoreIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		lie  func(*published)
		want string
	}{
		"another bootstrap":   {func(p *published) { p.boot = append([]byte(nil), p.boot...); p.boot[5000] ^= 1 }, "bootstrap has digest"},
		"a shorter bootstrap": {func(p *published) { p.boot = p.boot[:len(p.boot)-4096] }, "bootstrap has digest"},
		"another config":      {func(p *published) { p.config = []byte("{}") }, "config has digest"},
		"another size":        {func(p *published) { p.statement.BootstrapSize++ }, "bootstrap"},
		"a huge size":         {func(p *published) { p.statement.BootstrapSize = rafs.MaxBootstrap + 4096 }, "bootstrap"},
		"no RAFS in the digest": {func(p *published) {
			p.boot = make([]byte, 8192)
			p.statement.Bootstrap = chunk.Sum(p.boot)
			p.statement.BootstrapSize = 8192
		}, "bootstrap"},
		"another key's signature": {func(p *published) { p.key, _ = signer.Generate() }, "key"},
		"another name's word":     {func(p *published) { p.ref.Tag = "v2" }, "v2"},
	} {
		p := publish(t)
		w := p.worker(t)
		ref := p.ref
		c.lie(p)
		im, err := w.Fetch(t.Context(), ref, image.HostPlatform())
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, %v, want an error with %q", name, im, err, c.want)
		}
		if left, _ := filepath.Glob(filepath.Join(w.Dir.Path(), "images", "*")); len(left) > 0 {
			t.Errorf("%s: kept %v", name, left)
		}
	}
}

func TestContentLeftOutUnaskedIsRefused(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	p.silent = true
	if im, err := p.fetch(t, w); err == nil {
		t.Errorf("got %v of a store that sent nothing", im)
	}
	p.silent = false
	if _, err := p.fetch(t, w); err != nil {
		t.Fatal(err)
	}
	p.silent = true
	p.statement.Converter, p.serial = "test/2", 8
	if im, err := p.fetch(t, w); err == nil {
		t.Errorf("got the old image %v for the new one", im)
	}
}

func TestAnOlderNameIsRefusedAfterANewerOne(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	if _, err := p.fetch(t, w); err != nil {
		t.Fatal(err)
	}
	p.serial = 6
	if _, err := p.fetch(t, w); !errors.Is(err, image.ErrRollback) {
		t.Errorf("serial 6 after 7: got %v, want ErrRollback", err)
	}
	p.serial = 9
	if _, err := p.fetch(t, w); err != nil {
		t.Errorf("serial 9 after 7: %v", err)
	}
	p.serial = 8
	if _, err := p.fetch(t, w); !errors.Is(err, image.ErrRollback) {
		t.Errorf("serial 8 after 9: got %v, want ErrRollback", err)
	}
	pinned := image.Ref{Repo: p.ref.Repo, Digest: &p.statement.Source}
	if _, err := w.Fetch(t.Context(), pinned, image.HostPlatform()); err != nil {
		t.Errorf("pinned by digest: %v", err)
	}
}

func TestTheSerialIsRememberedAndUnlockedBeforeContentComes(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	other := &folder.Images{Dir: w.Dir, Source: p, Origin: w.Origin, Trust: w.Trust, Log: w.Log}
	calls := 0
	p.verified = func() {
		if calls++; calls > 1 {
			return
		}
		raw, err := os.ReadFile(filepath.Join(w.Dir.Path(), "serials.json"))
		if err != nil || !strings.Contains(string(raw), `:7,`) {
			t.Errorf("serials are %s, error %v, want serial 7", raw, err)
		}
		// Another fetch goes through while the content of this one is on its way.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := other.Fetch(ctx, p.ref, image.HostPlatform()); err != nil {
			t.Error(err)
		}
	}
	if _, err := p.fetch(t, w); err != nil || calls != 2 {
		t.Errorf("error %v after %d fetches, want 2", err, calls)
	}
}

func TestFetchesAtOnceGiveOneImage(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			im, err := w.Fetch(t.Context(), p.ref, image.HostPlatform())
			if err != nil {
				t.Error(err)
				return
			}
			if got := chunk.Sum(im.Bootstrap); got != p.statement.Bootstrap {
				t.Errorf("bootstrap %s, want %s", got, p.statement.Bootstrap)
			}
		})
	}
	wg.Wait()
}

func TestAWorkerFolderIsPrivate(t *testing.T) {
	base := t.TempDir()
	open := filepath.Join(base, "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := folder.Open(open); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("a folder others can enter: got %v", err)
	}
	if _, err := folder.Open(filepath.Join(base, strings.Repeat("x", 100))); err == nil || !strings.Contains(err.Error(), "socket") {
		t.Errorf("a path too long for a socket: got %v", err)
	}
}
