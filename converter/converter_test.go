package converter_test

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/converter"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/image"
)

// files returns the paths of an image with what is in them, read back chunk by
// chunk from the store: content, link target, or "" and a slash for directories.
func (s *store) files(t testing.TB, st image.Statement) map[string]string {
	t.Helper()
	boot := buckettest.Bytes(t, s.mem, image.BootstrapKey(st.Bootstrap))
	if chunk.Sum(boot) != st.Bootstrap || int64(len(boot)) != st.BootstrapSize {
		t.Fatalf("bootstrap %s is not what its key says", st.Bootstrap)
	}
	if config := buckettest.Bytes(t, s.mem, image.ConfigKey(st.Config)); chunk.Sum(config) != st.Config {
		t.Fatalf("config %s is not what its key says", st.Config)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	if (im.Blob == nil) != (st.Blob == nil) {
		t.Fatalf("statement and bootstrap differ on the blob")
	}
	if st.Blob != nil {
		s.wantMapping(t, *st.Blob)
	}
	all := map[string]string{}
	err = im.Walk(func(path string, n *rafs.Inode) error {
		var b bytes.Buffer
		for _, d := range n.Chunks {
			p, err := s.Store.Get(t.Context(), d, nil)
			if err != nil {
				return err
			}
			b.Write(p)
		}
		b.WriteString(n.Target)
		if n.IsDir() {
			b.WriteString("/")
		}
		all[strings.TrimPrefix(path, "/")] = b.String()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// wantMapping fails when the mapping of v does not lead to a bootstrap with v. It
// returns which.
func (s *store) wantMapping(t testing.TB, v chunk.Digest) chunk.Digest {
	t.Helper()
	d, err := chunk.Parse(string(buckettest.Bytes(t, s.mem, image.BlobKey(v))))
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(buckettest.Bytes(t, s.mem, image.BootstrapKey(d)))
	if err != nil {
		t.Fatal(err)
	}
	if im.Blob == nil || im.Blob.ID != v {
		t.Errorf("blob %s leads to bootstrap %s, which has another", v, d)
	}
	return d
}

var (
	big  = strings.Repeat("quarry ", 3000)
	base = layerOf(testimage.Dir("etc"), testimage.File("etc/os", "debian"), testimage.File("big", big), testimage.Symlink("s", "big"))
	top  = testimage.Layer{Codec: "zstd", Entries: []testimage.Entry{testimage.File("etc/os", "quarry"), testimage.File(".wh.s", ""), testimage.File("bigger", big+"!")}}
)

func TestAnImageIsConvertedAndCanBeVerified(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base, top)
	r := s.convert(t, l.Source(""))
	v, files := s.verified(t, latest)
	want := map[string]string{"": "/", "etc": "/", "etc/os": "quarry", "big": big, "bigger": big + "!"}
	if diff := cmp.Diff(files, want); diff != "" {
		t.Errorf("files (-got +want):\n%s", diff)
	}
	if v.ID != r.ImageID || v.Statement.Source != r.Source || v.Name.Serial != 1 || !v.Name.Issued.Equal(now.Truncate(time.Second)) {
		t.Errorf("verified %+v, result %+v", v, r)
	}
	if r.Layers != 2 || r.LayersReused != 0 || r.Unchanged || r.FileBytes != int64(2*len(big)+1+6) || len(r.Warnings) != 0 {
		t.Errorf("figures %+v", r)
	}
	if r.NewPlainBytes >= r.FileBytes || r.NewStoredBytes <= 0 || r.NewStoredBytes >= r.NewPlainBytes {
		t.Errorf("figures %+v", r)
	}
}

func TestKnownLayersAreNotRead(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base, top)
	first := s.convert(t, l.Source(""))
	objects := s.objects(t)
	if err := os.RemoveAll(filepath.Join(l.Dir, "blobs")); err != nil {
		t.Fatal(err)
	}
	l.Tag("other", l.Image(testimage.Image{Layers: []testimage.Layer{base, top}})) // the layers again …
	for _, y := range []testimage.Layer{base, top} {                               // … but not to be read
		d, _ := l.Layer(y)
		if err := os.Truncate(l.BlobPath(d.Digest), 0); err != nil {
			t.Fatal(err)
		}
	}
	again := s.convert(t, l.Source(":latest"))
	if again.ImageID != first.ImageID || again.LayersReused != 2 || !again.Unchanged || again.NewChunks != 0 || again.NewStoredBytes != 0 {
		t.Errorf("converted again: %+v", again)
	}
	if diff := cmp.Diff(s.objects(t), objects); diff != "" {
		t.Errorf("objects changed:\n%s", diff)
	}
	if n, _ := s.Catalog.Name("img", "latest"); n.Serial != 2 {
		t.Errorf("serial %d, want 2", n.Serial)
	}
}

func TestTheSameLayerTwiceIsReadOnce(t *testing.T) {
	empty := testimage.Layer{Tar: make([]byte, 1024)}
	for _, workers := range []int{1, 4} {
		s := newStore(t)
		s.Workers = workers
		r := s.convert(t, testimage.Build(t, empty, base, empty, base, empty).Source(""))
		if r.Layers != 5 || r.LayersReused != 3 {
			t.Errorf("%d workers: %+v", workers, r)
		}
	}
}

func TestOneSourceHasOneImage(t *testing.T) {
	l := testimage.Build(t, base, top, layerOf(testimage.File("z", "z")), layerOf(testimage.Dir("d")))
	want := newStore(t)
	wantResult := want.convert(t, l.Source(""))
	for name, change := range map[string]func(s *store){
		"many workers":          func(s *store) { s.Workers = 8 },
		"a store that has more": func(s *store) { s.convert(t, testimage.Build(t, top, layerOf(testimage.File("x", "x"))).Source("")) },
		"another folder's key":  func(s *store) { s.MACKey = bytes.Repeat([]byte{8}, 32) },
	} {
		s := newStore(t)
		change(s)
		if r := s.convert(t, l.Source("")); r.ImageID != wantResult.ImageID {
			t.Errorf("%s: image id %s, want %s", name, r.ImageID, wantResult.ImageID)
		}
		got := s.objects(t)
		for key, body := range want.objects(t) {
			if got[key] != body && !strings.HasPrefix(key, "layers/") {
				t.Errorf("%s: object %s differs", name, key)
			}
		}
	}
}

func TestImagesWithoutData(t *testing.T) {
	for name, layers := range map[string][]testimage.Layer{
		"no layers":        nil,
		"an empty layer":   {{Tar: make([]byte, 1024)}},
		"only empty files": {layerOf(testimage.Dir("d"), testimage.File("d/a", ""), testimage.File("b", ""))},
		"all deleted":      {layerOf(testimage.File("a", "A")), layerOf(testimage.File(".wh.a", ""))},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			r := s.convert(t, testimage.Build(t, layers...).Source(""))
			if r.Statement.Blob != nil || r.FileBytes != 0 {
				t.Errorf("result %+v", r)
			}
			s.verified(t, latest)
		})
	}
}

func TestAnUnsignedImageHasNoSignatures(t *testing.T) {
	s := newStore(t)
	s.SigningKey = nil
	r := s.convert(t, testimage.Build(t, base).Source(""))
	if keys := buckettest.Keys(t, s.mem, image.SigPrefix(r.Source, amd64)); len(keys) != 0 {
		t.Errorf("signatures %v", keys)
	}
	if n, ok := s.Catalog.Name("img", "latest"); !ok || n.Statement != nil || n.Source != r.Source {
		t.Errorf("name %+v", n)
	}
}

func TestWithoutANameOnlyTheImageIsMade(t *testing.T) {
	s := newStore(t)
	r, err := converter.Convert(t.Context(), s.Config, converter.Request{Source: testimage.Build(t, base).Source("")})
	if err != nil {
		t.Fatal(err)
	}
	if names := s.Catalog.Names(); len(names) != 0 {
		t.Errorf("names %+v", names)
	}
	s.verified(t, image.Ref{Digest: &r.Source, Repo: "img"})
}

func TestProgressTellsOfEveryLayer(t *testing.T) {
	s := newStore(t)
	var events []converter.Event
	s.Progress = func(e converter.Event) { events = append(events, e) }
	l := testimage.Build(t, base, top)
	s.convert(t, l.Source(""))
	for i, want := range []struct{ cached bool }{{false}, {true}} {
		done := slices.DeleteFunc(slices.Clone(events), func(e converter.Event) bool { return !e.Done })
		if len(done) != 2 || done[0].Layer != 1 || done[1].Layer != 2 || done[1].Layers != 2 || done[0].Cached != want.cached {
			t.Errorf("run %d: events %+v", i, events)
		}
		if !want.cached && (done[0].Read != done[0].Size || done[0].Size == 0) {
			t.Errorf("run %d: events %+v", i, events)
		}
		events = nil
		s.convert(t, l.Source(""))
	}
}

func TestBadInputIsRefusedAndTheStoreStaysUsable(t *testing.T) {
	broken := func(f func(l *testimage.Layout, blob string)) func(t *testing.T) string {
		return func(t *testing.T) string {
			l := testimage.Build(t, layerOf(testimage.File("f", big)))
			d, _ := l.Layer(layerOf(testimage.File("f", big)))
			f(l, l.BlobPath(d.Digest))
			return l.Source("")
		}
	}
	of := func(layers ...testimage.Layer) func(t *testing.T) string {
		return func(t *testing.T) string { return testimage.Build(t, layers...).Source("") }
	}
	plain := testimage.Tar(t, testimage.File("f", big))
	otherID := testimage.Digest([]byte("other"))
	tests := map[string]struct {
		source func(t *testing.T) string
		words  []string
	}{
		"an unknown source":      {func(*testing.T) string { return "docker://x" }, []string{"oci:DIR"}},
		"a missing tag":          {func(t *testing.T) string { return testimage.Build(t, base).Source(":nope") }, []string{`no tag "nope"`, "latest"}},
		"a missing blob":         {broken(func(_ *testimage.Layout, blob string) { os.Remove(blob) }), []string{"blob is missing"}},
		"a flipped byte":         {broken(flipFile), []string{"blob has digest"}},
		"a truncated blob":       {broken(func(_ *testimage.Layout, blob string) { os.Truncate(blob, 50) }), []string{"blob has 50 bytes"}},
		"a truncated tar":        {of(testimage.Layer{Tar: plain[:len(plain)-4096]}), []string{`entry "f"`, "truncated"}},
		"another diffID":         {of(base, testimage.Layer{Entries: top.Entries, DiffID: otherID}), []string{"layer 2 of 2", "has the diffID", otherID}},
		"an unsupported codec":   {of(testimage.Layer{Blob: []byte("\xfd7zXZ\x00" + big)}), []string{"xz"}},
		"an unsupported type":    {of(testimage.Layer{MediaType: "text/plain"}), []string{"layer 1", "text/plain"}},
		"a path out of the root": {of(layerOf(testimage.File("d/..", "x"))), []string{"apply layer 1 of 1", "d/.."}},
		"an unknown tar type":    {of(layerOf(testimage.Device("odd", 'Z', 0, 0))), []string{`entry "odd"`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			good := testimage.Build(t, base).Source("")
			s.convert(t, good)
			before := s.objects(t)
			err := s.fail(t, tt.source(t), tt.words...)
			if !errors.As(err, new(*converter.InputError)) {
				t.Errorf("error %v is not the input's", err)
			}
			for key := range s.objects(t) {
				if before[key] == "" && !strings.HasPrefix(key, "layers/") {
					t.Errorf("object %s was left", key)
				}
			}
			s.convert(t, good)
			s.verified(t, latest)
		})
	}
}

func flipFile(_ *testimage.Layout, path string) {
	p, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	p[len(p)/2] ^= 1
	if err := os.WriteFile(path, p, 0o644); err != nil {
		panic(err)
	}
}

func TestAClaimedDiffIDProvesNothing(t *testing.T) {
	s := newStore(t)
	s.convert(t, testimage.Build(t, base).Source(""))
	baseID := testimage.Digest(testimage.Tar(t, base.Entries...))
	topID := testimage.Digest(testimage.Tar(t, top.Entries...))
	// Other bytes under a diffID the store knows.
	s.fail(t, testimage.Build(t, testimage.Layer{Entries: top.Entries, DiffID: baseID}).Source(""), baseID, topID)
	// A layer the store knows under another diffID: refused without reading it.
	l := testimage.Build(t, testimage.Layer{Entries: base.Entries, DiffID: topID})
	d, _ := l.Layer(base)
	if err := os.Remove(l.BlobPath(d.Digest)); err != nil {
		t.Fatal(err)
	}
	s.fail(t, l.Source(""), d.Digest, baseID, topID)
}

func TestALyingDescriptorOfAKnownLayerIsRefused(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base)
	s.convert(t, l.Source(""))
	m := testimage.Manifest{SchemaVersion: 2}
	d, diffID := l.Layer(base)
	d.Size++
	m.Layers = []testimage.Descriptor{d}
	m.Config = l.Blob(testimage.MediaConfig, []byte(`{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":["`+diffID+`"]}}`))
	l.Tag("lie", l.JSON(testimage.MediaManifest, m))
	s.fail(t, l.Source(":lie"), "its descriptor says")
}

func TestLimitsOfTheConfigAreUsed(t *testing.T) {
	s := newStore(t)
	s.Limits.Layer.MaxEntries = 1
	s.fail(t, testimage.Build(t, base).Source(""), "MaxEntries")
	s.Limits = converter.Limits{}
	s.Limits.Tree.Names = 1
	s.fail(t, testimage.Build(t, base).Source(""), "more than 1 names")
}

func TestConversionsAtOnceAllEndWithTheNameOnOneOfThem(t *testing.T) {
	s := newStore(t)
	var sources []string
	for _, mark := range []string{"a", "b", "c", "d"} {
		sources = append(sources, testimage.Build(t, base, layerOf(testimage.File("mark", mark))).Source(""))
	}
	var wg sync.WaitGroup
	results := make([]*converter.Result, len(sources))
	for i, src := range sources {
		wg.Go(func() {
			var err error
			if results[i], err = converter.Convert(t.Context(), s.Config, request(src)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	v, _ := s.verified(t, latest)
	ids := map[chunk.Digest]bool{}
	for _, r := range results {
		ids[r.ImageID] = true
	}
	if !ids[v.ID] || v.Name.Serial != 4 {
		t.Errorf("name has serial %d and image %s", v.Name.Serial, v.ID)
	}
}

func TestFixtureImagesAreConvertedOrRefusedByName(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(need.Fixtures(t), "images", "*.tar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	converted := map[string]int64{}
	for _, f := range files {
		s := newStore(t)
		r, err := converter.Convert(t.Context(), s.Config, converter.Request{Source: "oci-archive:" + f, Platform: image.Platform{}})
		if err == nil {
			converted[filepath.Base(f)] = r.FileBytes
		} else if !strings.Contains(err.Error(), f) {
			t.Errorf("error %q does not name %s", err, f)
		}
	}
	if len(converted) < 2 {
		t.Errorf("only %v were converted", slices.Collect(maps.Keys(converted)))
	}
	t.Log(converted)
}
