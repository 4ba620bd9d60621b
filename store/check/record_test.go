package check_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/signer"
	"quarry/store/bucket/buckettest"
	"quarry/store/catalog"
	"quarry/store/check"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
	"quarry/store/registry"
	"quarry/store/trace"
)

// What another quarry has written is unknown and not damaged: it stays.
func TestRecordsOfAnotherVersionAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	layer := buckettest.Keys(t, w.bucket, image.LayersPrefix)[0]
	failure := image.FailureKey("team/task", "v1")
	raw := buckettest.Bytes(t, w.bucket, layer)
	for _, version := range []uint32{1, 3, 1 << 20} {
		binary.LittleEndian.PutUint32(raw[8:], version)
		buckettest.Put(t, w.bucket, layer, raw)
		buckettest.Put(t, w.bucket, failure, []byte(`{"version":7,"more":1}`))
		if found, _ := w.run(t); len(found) > 0 {
			t.Errorf("version %d: found %+v", version, found)
		}
		if got := buckettest.Bytes(t, w.bucket, layer); !slices.Equal(got, raw) {
			t.Errorf("version %d: the layer record was changed", version)
		}
		buckettest.Bytes(t, w.bucket, failure)
	}
	w.convert(t)
	if found, _ := w.run(t); len(found) > 0 {
		t.Errorf("after converting again: %+v", found)
	}
}

func TestAFailureRecordThatIsNoneIsRemoved(t *testing.T) {
	w := newWorld(t)
	good, err := image.EncodeFailure(image.Failure{
		Repo: "team/task", Tag: "v2", State: image.FailureUnfinished, Source: "oci:/x", Converter: "c/1", Time: time.Unix(1e9, 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	key := image.FailureKey("team/task", "v2")
	buckettest.Put(t, w.bucket, key, good)
	if found, _ := w.run(t); len(found) > 0 {
		t.Fatalf("found %+v, and the record is good", found)
	}
	for name, junk := range map[string]string{
		"empty": "", "no record": "{}", "of another name": string(good), "too large": strings.Repeat("x", image.MaxFailure+1),
	} {
		key := image.FailureKey("team/task", "v3")
		buckettest.Put(t, w.bucket, key, []byte(junk))
		found, _ := w.run(t)
		if len(found) != 1 || found[0].Kind != "failure-record" || found[0].Object != key || found[0].Note {
			t.Errorf("%s: found %+v, want %s", name, found, key)
		}
		if found, _ := w.run(t); len(found) > 0 {
			t.Errorf("%s: found %+v after it was removed", name, found)
		}
	}
	buckettest.Bytes(t, w.bucket, key)
}

func TestATraceRecordThatIsNoneIsRemoved(t *testing.T) {
	w := newWorld(t)
	r := trace.Record{Image: chunk.Sum([]byte("image")), Source: chunk.Sum([]byte("source")), Platform: image.HostPlatform(), Numbers: []uint32{3, 1}}
	good, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1e9, 0)
	kept := trace.KeyOf(r, good, at).String()
	buckettest.Put(t, w.bucket, kept, good)
	later := slices.Clone(good)
	later[8] = 9
	buckettest.Put(t, w.bucket, trace.KeyOf(r, later, at).String(), later)
	if found, _ := w.run(t); len(found) > 0 {
		t.Fatalf("found %+v, and one record is good, one of a later quarry", found)
	}
	for name, c := range map[string]struct{ key, body string }{
		"empty":               {kept, ""},
		"cut off":             {kept, string(good[:len(good)-1])},
		"of another moment":   {kept[:len(kept)-1] + "x", string(good)},
		"a key of nothing":    {trace.Prefix + "x", string(good)},
		"bytes of another":    {strings.Replace(kept, r.Image.Hex(), r.Source.Hex(), 1), string(good)},
		"too large":           {kept, strings.Repeat("x", trace.MaxRecord+1)},
		"its sum is not that": {trace.KeyOf(r, later, at).String(), string(good)},
	} {
		buckettest.Put(t, w.bucket, c.key, []byte(c.body))
		found, _ := w.run(t)
		if len(found) != 1 || found[0].Kind != "trace-record" || found[0].Object != c.key || found[0].Note {
			t.Errorf("%s: found %+v, want %s", name, found, c.key)
		}
		if found, _ := w.run(t); len(found) > 0 {
			t.Errorf("%s: found %+v after it was removed", name, found)
		}
	}
}

func TestAJobRecordThatIsNoneIsRemoved(t *testing.T) {
	w := newWorld(t)
	r := jobs.Record{Source: chunk.Sum([]byte("source")), Names: []jobs.Name{{Repo: "a", Tag: "b"}}, State: jobs.Queued, Created: time.Unix(1e9, 0)}
	good, err := jobs.Encode(r)
	if err != nil {
		t.Fatal(err)
	}
	key := jobs.Key(r.ID())
	buckettest.Put(t, w.bucket, key, good)
	buckettest.Put(t, w.bucket, jobs.Prefix+"x", bytes.Replace(good, []byte(`"version":1`), []byte(`"version":2`), 1))
	if found, _ := w.run(t); len(found) > 0 {
		t.Fatalf("found %+v, and one record is good, one of a later quarry", found)
	}
	for name, c := range map[string]struct{ key, body string }{
		"empty":            {key, ""},
		"another job's":    {jobs.Key(jobs.ID(r.Source, "linux/amd64")), string(good)},
		"longer than most": {key, strings.Repeat("x", jobs.MaxRecord+1)},
	} {
		buckettest.Put(t, w.bucket, c.key, []byte(c.body))
		found, _ := w.run(t)
		if len(found) != 1 || found[0].Kind != "job-record" || found[0].Object != c.key || found[0].Note {
			t.Errorf("%s: found %+v, want %s", name, found, c.key)
		}
		if found, _ := w.run(t); len(found) > 0 {
			t.Errorf("%s: found %+v after it was removed", name, found)
		}
	}
}

// A name whose image is still to be made is no damage: its manifest is kept.
func TestAPushedNameWithoutAnImageIsAState(t *testing.T) {
	w := newWorld(t)
	manifest := []byte("{}")
	source := chunk.Sum(manifest)
	if err := w.Catalog.SetName(t.Context(), catalog.Name{Repo: "new", Tag: "v1", Source: source, Serial: 1}); err != nil {
		t.Fatal(err)
	}
	if found, _ := w.run(t); len(found) == 0 || found[0].Note {
		t.Errorf("without a manifest: %+v", found)
	}
	buckettest.Put(t, w.bucket, registry.ContentKey(digest.Digest(source.String())), manifest)
	found, _ := w.run(t)
	if i := slices.IndexFunc(found, func(p check.Problem) bool { return p.Kind == "unconverted" }); i < 0 || !found[i].Note {
		t.Errorf("with one: %+v", found)
	}
}

// A statement of another version is noted, when nothing says that it was altered.
func TestAStatementOfAnotherVersionIsUnknown(t *testing.T) {
	w := newWorld(t)
	w.Signed = true
	sigKey := w.sigs(t)[0]
	key, _, _ := strings.Cut(sigKey, "/sigs/")
	key += "/statement"
	payload := []byte(strings.Replace(string(buckettest.Bytes(t, w.bucket, key)), `"version":1`, `"version":9`, 1))
	buckettest.Put(t, w.bucket, key, payload)
	found, _ := w.run(t)
	if got := kinds(found); !slices.Equal(got, []string{"statement"}) {
		t.Errorf("altered: found %+v, want the statement", found)
	}
	sig := signer.Sign(w.conv.SigningKey, image.StatementType, payload)
	raw, err := sig.Encode()
	if err != nil {
		t.Fatal(err)
	}
	buckettest.Put(t, w.bucket, sigKey, raw)
	found, _ = w.run(t)
	if got := kinds(found); !slices.Equal(got, []string{"note unknown"}) {
		t.Errorf("of a later quarry: found %+v, want a note", found)
	}
}
