package folder_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

func TestAnImageThatWasUsedHereIsKnownWithoutAStore(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 3, 1)
	d, p := n.images.Dir, image.HostPlatform()
	pinned := image.Ref{Repo: img.Ref.Repo, Digest: &img.Source}
	for _, ref := range []image.Ref{img.Ref, pinned} {
		if id, err := d.Known(ref, p); !errors.Is(err, folder.ErrUnknown) {
			t.Errorf("%s before it was fetched: %s, %v", ref, id, err)
		}
	}
	im, err := n.images.Fetch(t.Context(), img.Ref, p)
	if err != nil {
		t.Fatal(err)
	}
	for _, ref := range []image.Ref{img.Ref, pinned} {
		if id, err := d.Known(ref, p); id != im.ID || err != nil {
			t.Errorf("%s: %s, %v, want %s", ref, id, err, im.ID)
		}
	}
	names, err := d.Names()
	if err != nil || len(names) != 1 || len(names[im.ID]) != 1 || names[im.ID][0] != img.Ref.String() {
		t.Errorf("names %v, error %v", names, err)
	}
	other := chunk.Sum([]byte("another source"))
	unknown := map[string]error{}
	_, unknown["another tag"] = d.Known(image.Ref{Repo: img.Ref.Repo, Tag: "v2"}, p)
	_, unknown["another digest"] = d.Known(image.Ref{Repo: img.Ref.Repo, Digest: &other}, p)
	_, unknown["another platform"] = d.Known(img.Ref, image.Platform{OS: "linux", Arch: "s390x"})
	_, unknown["a digest for another platform"] = d.Known(pinned, image.Platform{OS: "linux", Arch: "s390x"})
	if err := os.RemoveAll(filepath.Join(d.Path(), "images", im.ID.Hex())); err != nil {
		t.Fatal(err)
	}
	_, unknown["an image that was removed"] = d.Known(img.Ref, p)
	for what, err := range unknown {
		if !errors.Is(err, folder.ErrUnknown) {
			t.Errorf("%s: %v, want unknown", what, err)
		}
	}
	if d.Has(im.ID) {
		t.Error("the folder has an image that was removed")
	}
}
