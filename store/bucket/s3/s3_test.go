package s3_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/s3"
	"quarry/store/bucket/s3/s3test"
)

// open opens a bucket through endpoint, with parts small enough that tests have
// many, and pauses short enough to wait for.
func open(t testing.TB, endpoint, name, prefix string) *s3.Bucket {
	t.Helper()
	b, err := s3.Open(t.Context(), s3.Config{
		Location: s3.Location{Bucket: name, Prefix: prefix, Endpoint: endpoint},
		PartSize: 5 << 20, Backoff: 5 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func TestBucket(t *testing.T) {
	server := s3test.New(t)
	buckettest.Run(t, func(t *testing.T) bucket.Bucket { return open(t, server.URL, server.Bucket(t), "") })
}

func TestJournal(t *testing.T) {
	server := s3test.New(t)
	buckettest.RunJournal(t, func(t *testing.T) bucket.Journal { return open(t, server.URL, server.Bucket(t), "") })
}

// Two stores in one bucket see nothing of one another.
func TestPrefixesAreApart(t *testing.T) {
	server := s3test.New(t)
	name := server.Bucket(t)
	one, two := open(t, server.URL, name, "one"), open(t, server.URL, name, "deep/two")
	for _, b := range []*s3.Bucket{one, two} {
		if err := b.Probe(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	buckettest.Put(t, one, "a/b", []byte("one"))
	if err := one.Append(t.Context(), 1, []byte("entry")); err != nil {
		t.Fatal(err)
	}
	if keys := buckettest.Keys(t, two, ""); len(keys) != 0 {
		t.Errorf("two has %q", keys)
	}
	if entries := buckettest.Entries(t, two, 1); len(entries) != 0 {
		t.Errorf("two has entries %v", entries)
	}
	if keys := buckettest.Keys(t, one, ""); len(keys) != 1 || keys[0] != "a/b" {
		t.Errorf("one has %q, want a/b alone", keys)
	}
	if _, err := two.Stat(t.Context(), "a/b"); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("two: got error %v, want %v", err, bucket.ErrNotFound)
	}
}

// An object in many parts comes back, and one that fails in the middle leaves
// nothing, not even parts.
func TestManyParts(t *testing.T) {
	server := s3test.New(t)
	b := open(t, server.URL, server.Bucket(t), "")
	want := bytes.Repeat([]byte("0123456789abcde\n"), 2<<20) // 32 MiB: 7 parts
	buckettest.Put(t, b, "packs/many", want)
	if got := buckettest.Bytes(t, b, "packs/many"); !bytes.Equal(got, want) {
		t.Error("other bytes came back")
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	server := s3test.New(t)
	try := func(loc s3.Location) error {
		_, err := s3.Open(t.Context(), s3.Config{Location: loc, Backoff: time.Millisecond})
		return err
	}
	check := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), s3test.Secret) {
			t.Errorf("%s: got error %v, want one that says %q and no secret", what, err, want)
		}
	}
	check("no bucket", try(s3.Location{Bucket: "none", Endpoint: server.URL}), "no such bucket")
	check("no server", try(s3.Location{Bucket: "none", Endpoint: "http://127.0.0.1:1"}), "refused")
	check("no region", try(s3.Location{Bucket: "none"}), "AWS_REGION")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong")
	check("a wrong secret", try(s3.Location{Bucket: server.Bucket(t), Endpoint: server.URL}), "AWS_SECRET_ACCESS_KEY")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	check("no credentials", try(s3.Location{Bucket: "none", Endpoint: server.URL}), "AWS_ACCESS_KEY_ID")
}

func TestLocationsHaveOneSpelling(t *testing.T) {
	for text, want := range map[string]string{
		"s3://bkt":          "s3://bkt",
		"s3://bkt/":         "s3://bkt",
		"s3://bkt/a/b/":     "s3://bkt/a/b",
		"s3://bkt?region=x": "s3://bkt?region=x",
		"s3://bkt/p?region=eu-1&endpoint=http://h:9/": "s3://bkt/p?endpoint=http%3A%2F%2Fh%3A9&region=eu-1",
	} {
		loc, err := s3.ParseURL(text)
		if err != nil || loc.String() != want {
			t.Errorf("%s: got %s, %v, want %s", text, loc, err, want)
		}
		if again, err := s3.ParseURL(want); err != nil || again != loc {
			t.Errorf("%s: got %+v, %v, want %+v", want, again, err, loc)
		}
	}
	for _, text := range []string{
		"", "s3://", "s3://b", "s3://Bkt", "s3://u:secret@bkt", "http://bkt", "s3://bkt/a//b", "s3://bkt/../a", "s3://bkt#f", "s3://bkt?x=1",
		"s3://bkt?region=a&region=b", "s3://bkt?endpoint=h:9", "s3://bkt?endpoint=http://u:secret@h", "s3://bkt?endpoint=http://h/path",
		"s3://bkt/" + strings.Repeat("p", 257), "s3://bkt?endpoint=http://%zz:secret@h", "s3://bkt:80",
	} {
		loc, err := s3.ParseURL(text)
		if err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: got %+v, error %v, want one without the secret", text, loc, err)
		}
	}
}
