package chunkindex_test

import (
	"testing"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// A place that was looked up must not outlive what the index says.
func TestALookUpAfterAChangeSeesTheChange(t *testing.T) {
	d := chunk.Sum([]byte("chunk"))
	one, two := chunk.Sum([]byte("one")), chunk.Sum([]byte("two"))
	entry := pack.Entry{Digest: d, Off: 68, Stored: 5, Len: 5}
	insert := func(id chunk.Digest) func(*chunkindex.Index) error {
		return func(x *chunkindex.Index) error { return x.InsertBatch(t.Context(), id, []pack.Entry{entry}) }
	}
	for _, c := range []struct {
		name   string
		change func(*chunkindex.Index) error
		want   chunk.Digest // pack; zero when it is gone
	}{
		{"moved to another pack", insert(two), two},
		{"deleted", func(x *chunkindex.Index) error {
			_, err := x.DeleteIf(t.Context(), d, chunkindex.At(one, entry))
			return err
		}, chunk.Digest{}},
		{"its pack dropped", func(x *chunkindex.Index) error {
			_, err := x.DropPack(t.Context(), one)
			return err
		}, chunk.Digest{}},
		{"reset", func(x *chunkindex.Index) error { return x.Reset(t.Context()) }, chunk.Digest{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, err := chunkindex.Open(chunkindex.Config{Dir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			if err := insert(one)(x); err != nil {
				t.Fatal(err)
			}
			wantPack(t, x, d, one)
			wantPack(t, x, d, one) // remembered
			if err := c.change(x); err != nil {
				t.Fatal(err)
			}
			wantPack(t, x, d, c.want)
			wantPack(t, x, d, c.want)
		})
	}
}

func wantPack(t *testing.T, x *chunkindex.Index, d, want chunk.Digest) {
	t.Helper()
	locs, found, err := x.LookupBatch(t.Context(), []chunk.Digest{d})
	if err != nil {
		t.Fatal(err)
	}
	if found[0] != !want.IsZero() || locs[0].Pack != want {
		t.Errorf("found %v in pack %s, want pack %s", found[0], locs[0].Pack, want)
	}
}
