package folder_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

func TestADigestIsHadWithoutAStore(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	host := image.HostPlatform()
	pinned := image.Ref{Repo: p.ref.Repo, Digest: &p.statement.Source}
	if im, err := w.Offline(pinned, host); !errors.Is(err, folder.ErrOffline) {
		t.Errorf("before it was fetched: an image %t, %v", im != nil, err)
	}
	fetched, err := p.fetch(t, w)
	if err != nil {
		t.Fatal(err)
	}
	im, err := w.Offline(pinned, host)
	if err != nil || im.ID != fetched.ID || im.RAFS.FileBytes() != 5 || string(im.Config) != string(p.config) {
		t.Errorf("got an image: %t, %v", im != nil, err)
	}
	// A tag may be another image by now.
	if im, err := w.Offline(p.ref, host); !errors.Is(err, folder.ErrOffline) || !strings.Contains(err.Error(), p.ref.Repo+"@"+p.statement.Source.String()) {
		t.Errorf("a tag: an image %t, %v", im != nil, err)
	}
	other := chunk.Sum([]byte("another"))
	for name, ref := range map[string]image.Ref{"another digest": {Repo: p.ref.Repo, Digest: &other}, "another tag": {Repo: p.ref.Repo, Tag: "v2"}} {
		if im, err := w.Offline(ref, host); !errors.Is(err, folder.ErrOffline) || !errors.Is(err, folder.ErrUnknown) {
			t.Errorf("%s: an image %t, %v", name, im != nil, err)
		}
	}
	if im, err := w.Offline(pinned, image.Platform{OS: "linux", Arch: "s390x"}); !errors.Is(err, folder.ErrUnknown) {
		t.Errorf("another platform: an image %t, %v", im != nil, err)
	}
}

// What counts is who is trusted now, and not when the image was fetched.
func TestARevokedKeyCountsForNothingWithoutAStoreToo(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	pinned := image.Ref{Repo: p.ref.Repo, Digest: &p.statement.Source}
	if _, err := p.fetch(t, w); err != nil {
		t.Fatal(err)
	}
	next, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	trusted := w.Trust
	w.Trust = signer.NewTrust(next.Public())
	if im, err := w.Offline(pinned, image.HostPlatform()); !errors.Is(err, signer.ErrWrongKey) {
		t.Errorf("got an image: %t, %v", im != nil, err)
	}
	// The image is signed by the next key, and asked for once while there is a store.
	p.key, p.serial = next, p.serial+1
	if _, err := p.fetch(t, w); err != nil {
		t.Fatal(err)
	}
	if p.bootstraps != 1 {
		t.Errorf("the image was sent %d times", p.bootstraps)
	}
	if im, err := w.Offline(pinned, image.HostPlatform()); err != nil {
		t.Errorf("by the next key: an image %t, %v", im != nil, err)
	}
	w.Trust = trusted
	if im, err := w.Offline(pinned, image.HostPlatform()); !errors.Is(err, signer.ErrWrongKey) {
		t.Errorf("by the old key alone: an image %t, %v", im != nil, err)
	}
}

func TestWhatIsDamagedIsNotHadWithoutAStore(t *testing.T) {
	for _, name := range []string{"signed", "statement", "config", "bootstrap"} {
		for what, damage := range map[string]func(path string) error{
			"gone":  os.Remove,
			"empty": func(path string) error { return os.Truncate(path, 0) },
			"flipped": func(path string) error {
				b, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				b[len(b)/2] ^= 1
				return os.WriteFile(path, b, 0o600)
			},
		} {
			p := publish(t)
			w := p.worker(t)
			im, err := p.fetch(t, w)
			if err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Join(w.Dir.Path(), "images", im.ID.Hex(), name)); err != nil {
				t.Fatal(err)
			}
			pinned := image.Ref{Repo: p.ref.Repo, Digest: &p.statement.Source}
			if _, err := w.Offline(pinned, image.HostPlatform()); err == nil {
				t.Errorf("%s %s: had all the same", name, what)
			}
			if _, err := p.fetch(t, w); err != nil { // and with one it is mended
				t.Errorf("%s %s: fetched again: %v", name, what, err)
			}
			if _, err := w.Offline(pinned, image.HostPlatform()); err != nil {
				t.Errorf("%s %s: fetched again, and then: %v", name, what, err)
			}
		}
	}
}

// The signatures of another image that was here are none of this one's.
func TestTheSignaturesOfAnotherImageCountForNothing(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	first, err := p.fetch(t, w)
	if err != nil {
		t.Fatal(err)
	}
	p.statement.Converter, p.serial = "test/2", 8 // the same source, converted anew
	pinned := image.Ref{Repo: p.ref.Repo, Digest: &p.statement.Source}
	second, err := w.Fetch(t.Context(), pinned, image.HostPlatform())
	if err != nil {
		t.Fatal(err)
	}
	signed := func(im *folder.Image) string { return filepath.Join(w.Dir.Path(), "images", im.ID.Hex(), "signed") }
	b, err := os.ReadFile(signed(first))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(signed(second), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if im, err := w.Offline(pinned, image.HostPlatform()); !errors.Is(err, folder.ErrOffline) {
		t.Errorf("got an image: %t, %v", im != nil, err)
	}
}
