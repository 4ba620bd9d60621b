package folder_test

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

func TestAnImageThatIsKnownIsDecodedOnce(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	w.Decoded = &folder.Decoded{}
	images := make([]*folder.Image, 8)
	var wg sync.WaitGroup
	for i := range images {
		wg.Go(func() {
			var err error
			if images[i], err = p.fetch(t, w); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	plain, err := w.Dir.Load(images[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	var kept []*rafs.Image
	for _, im := range images {
		if im.RAFS.Tree == nil && !slices.Contains(kept, im.RAFS) {
			kept = append(kept, im.RAFS)
		}
	}
	whole := slices.IndexFunc(images, func(im *folder.Image) bool { return im.RAFS.Tree != nil })
	if len(kept) != 1 || whole < 0 {
		t.Fatalf("%d are kept, the one with its tree at %d: it was decoded more than once", len(kept), whole)
	}
	for i, im := range images {
		if (im.RAFS.Tree != nil) != (i == whole) || im.RAFS.DeviceSize() != plain.RAFS.DeviceSize() || im.ACL != plain.ACL || chunk.Sum(im.Bootstrap) != p.statement.Bootstrap {
			t.Errorf("what is kept of it is not what a sandbox needs: %+v", im.RAFS)
		}
	}
}

func TestWhatIsDecodedIsVerifiedAllTheSame(t *testing.T) {
	p := publish(t)
	w := p.worker(t)
	w.Decoded = &folder.Decoded{}
	im, err := p.fetch(t, w)
	if err != nil {
		t.Fatal(err)
	}
	boot := filepath.Join(w.Dir.Path(), "images", im.ID.Hex(), "bootstrap")
	raw, err := os.ReadFile(boot)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)-1] ^= 1
	if err := os.WriteFile(boot, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	before := p.bootstraps
	if _, err := p.fetch(t, w); err != nil || p.bootstraps != before+1 {
		t.Errorf("a damaged bootstrap: error %v, fetched %d times more, want once", err, p.bootstraps-before)
	}
	if _, err := w.Dir.Load(im.ID); err != nil {
		t.Errorf("it is damaged still: %v", err)
	}
	other, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	w.Trust = signer.NewTrust(other.Public())
	if _, err := p.fetch(t, w); err == nil {
		t.Error("it is taken with a key that nobody trusts any more")
	}
	pinned := image.Ref{Repo: p.ref.Repo, Digest: &p.statement.Source}
	if _, err := w.Offline(pinned, image.HostPlatform()); err == nil {
		t.Error("and without a store")
	}
}
