package registry_test

import (
	"testing"

	"github.com/opencontainers/go-digest"

	"quarry/store/registry"
)

// A store that drops layers misses none of them, but the config.
func TestDroppedLayersAreNotMissed(t *testing.T) {
	for _, layersGo := range []bool{false, true} {
		l := newLab(t, func(c *registry.Config) { c.LayersGo = layersGo })
		d := l.put(t, "r", l.image(t, "r", "layer"), "t")
		m, err := l.StatManifest(t.Context(), "r", d)
		must(t, err)
		must(t, l.CheckWhole(t.Context(), "r", m))
		must(t, l.bucket.Delete(t.Context(), registry.ContentKey(digest.FromString("layer"))))
		if err := l.CheckWhole(t.Context(), "r", m); (err == nil) != layersGo {
			t.Errorf("layers go %t: without a layer: %v", layersGo, err)
		}
		must(t, l.bucket.Delete(t.Context(), registry.ContentKey(digest.FromString("{}"))))
		wantErr(t, "without the config", registry.AsUnknown(l.CheckWhole(t.Context(), "r", m)), registry.ErrManifestUnknown)
	}
}
