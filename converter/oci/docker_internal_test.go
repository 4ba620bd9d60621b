package oci

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/internal/testimage"
)

// Of an archive of many images only the chosen one's documents stay in memory:
// each may have a config of image.MaxConfig.
func TestOnlyTheChosenImageIsKept(t *testing.T) {
	const images = 20
	plain := testimage.Tar(t, testimage.File("a", "A"))
	members := []testimage.Entry{testimage.File("a.tar", string(plain))}
	var list []saved
	for i := range images {
		name := fmt.Sprintf("c%d.json", i)
		config := fmt.Sprintf(`{"os":"linux","architecture":"amd64","author":"%d","rootfs":{"type":"layers","diff_ids":["%s"]}}`, i, testimage.Digest(plain))
		members = append(members, testimage.File(name, config))
		list = append(list, saved{Config: name, Layers: []string{"a.tar"}})
	}
	manifest, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	f := filepath.Join(t.TempDir(), "saved.tar")
	if err := os.WriteFile(f, testimage.Tar(t, append(members, testimage.File("manifest.json", string(manifest)))...), 0o600); err != nil {
		t.Fatal(err)
	}
	kept := func(sel string) (int, int, error) {
		b, err := openDockerArchive(t.Context(), f+sel, Config{}.withDefaults())
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		a := b.(*dockerArchive)
		_, err = a.top(t.Context())
		return len(a.chosen.docs), len(a.chosen.layers), err
	}
	docs, layers, err := kept("")
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("there are %d images", images)) || docs+layers != 0 {
		t.Fatalf("%d documents, %d layers, error %v", docs, layers, err)
	}
	_, digests, _ := strings.Cut(err.Error(), "name one of ")
	for _, sel := range strings.Split(digests, ", ") {
		if docs, layers, err := kept(sel); err != nil || docs != 2 || layers != 1 {
			t.Errorf("%s: %d documents, %d layers, error %v", sel, docs, layers, err)
		}
	}
}
