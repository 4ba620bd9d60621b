package registry_test

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"quarry/store/bucket/buckettest"
	"quarry/store/registry"
)

func read(t *testing.T, l *lab, repo string, d digest.Digest) ([]byte, error) {
	t.Helper()
	c, err := l.Blob(t.Context(), repo, d)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(c.Reader(t.Context(), 0, c.Size))
}

func TestABlobIsThereForItsRepositoryAlone(t *testing.T) {
	l := newLab(t, nil)
	for _, content := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte("0123456789abcdef"), 1<<17+3)} {
		d := l.push(t, "a", content)
		got, err := read(t, l, "a", d)
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes: got %d, %v", len(content), len(got), err)
		}
		_, err = l.Blob(t.Context(), "a/b", d)
		wantErr(t, "in another repository", err, registry.ErrBlobUnknown)
		long := digest.SHA512.FromBytes(content)
		_, err = l.Blob(t.Context(), "a", long)
		wantErr(t, "by another digest", err, registry.ErrBlobUnknown)
		must(t, l.pushAs(t, "a", content, long))
		if got, err := read(t, l, "a", long); err != nil || !bytes.Equal(got, content) {
			t.Errorf("sha512 of %d bytes: got %d, %v", len(content), len(got), err)
		}
	}
}

func TestAMountMovesNoBytesAndBelievesNobody(t *testing.T) {
	l := newLab(t, nil)
	d := l.push(t, "a", []byte("layer"))
	wantErr(t, "from a repository without it", l.Mount(t.Context(), "b", "c", d), registry.ErrBlobUnknown)
	must(t, l.Mount(t.Context(), "b", "a", d))
	must(t, l.DeleteBlob(t.Context(), "a", d))
	if got, err := read(t, l, "b", d); err != nil || string(got) != "layer" {
		t.Errorf("mounted blob: got %q, %v", got, err)
	}
	wantErr(t, "from where it was deleted", l.Mount(t.Context(), "c", "a", d), registry.ErrBlobUnknown)
	wantErr(t, "deleted twice", l.DeleteBlob(t.Context(), "a", d), registry.ErrBlobUnknown)
	if n := objects(t, l.bucket, registry.BlobsPrefix); n != 1 {
		t.Errorf("%d contents are stored, want 1", n)
	}
	must(t, l.bucket.Delete(t.Context(), registry.ContentKey(d)))
	wantErr(t, "content is gone", l.Mount(t.Context(), "c", "b", d), registry.ErrBlobUnknown)
}

// Bug 66: a 200 has the right bytes, whatever the bucket has by now.
func TestDamageIsNeverServedWhole(t *testing.T) {
	l := newLab(t, nil)
	content := bytes.Repeat([]byte("abcdefgh"), 1<<18)
	d := l.push(t, "a", content)
	must(t, l.bucket.Put(t.Context(), registry.ContentKey(d), bytes.NewReader(nil), 0))
	_, err := l.Blob(t.Context(), "a", d)
	wantErr(t, "an empty object", err, registry.ErrDamaged)
	wantErr(t, "an empty object, for who would push it", err, registry.ErrBlobUnknown)
	must(t, l.pushAs(t, "a", content, d))
	bad := bytes.Clone(content)
	bad[5] ^= 1
	must(t, l.bucket.Put(t.Context(), registry.ContentKey(d), bytes.NewReader(bad), int64(len(bad))))
	got, err := read(t, l, "a", d)
	wantErr(t, "a flipped bit", err, registry.ErrDamaged)
	if len(got) == len(content) {
		t.Error("all bytes were served before they were verified")
	}
	_, err = l.Blob(t.Context(), "a", d)
	wantErr(t, "found damaged, so that clients send it again", err, registry.ErrBlobUnknown)
	must(t, l.pushAs(t, "b", content, d)) // heals both
	if got, err := read(t, l, "a", d); err != nil || !bytes.Equal(got, content) {
		t.Errorf("pushed again: got %d bytes, %v", len(got), err)
	}
}

// Bug 55: one blob from many at once, and a liar among them.
func TestManyPushOneBlobAtOnce(t *testing.T) {
	var puts atomic.Int64
	l := newLab(t, func(c *registry.Config) {
		c.Bucket = &buckettest.Faulty{Bucket: c.Bucket, Before: func(op buckettest.Op) error {
			if op.Method == "Put" && strings.HasPrefix(op.Key, registry.BlobsPrefix) {
				puts.Add(1)
			}
			return nil
		}}
	})
	content := bytes.Repeat([]byte("x"), 1<<20)
	d := digest.FromBytes(content)
	ready := make(chan struct{})
	var g errgroup.Group
	for i := range 20 {
		repo := fmt.Sprintf("r%d", i%2)
		id, err := l.StartUpload(repo, "")
		must(t, err)
		g.Go(func() error {
			<-ready
			if i == 7 {
				wantErr(t, "the liar", l.FinishUpload(t.Context(), repo, id, part([]byte("lie")), d), registry.ErrDigestInvalid)
				return nil
			}
			return l.FinishUpload(t.Context(), repo, id, part(content), d)
		})
	}
	close(ready)
	must(t, g.Wait())
	if n := puts.Load(); n != 1 {
		t.Errorf("the blob was stored %d times, want once", n)
	}
	for _, repo := range []string{"r0", "r1"} {
		if got, err := read(t, l, repo, d); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: got %d bytes, %v", repo, len(got), err)
		}
	}
	wantFiles(t, l, 0)
}

// Bug 59: what a client was told is there is not collected before it had time to
// name it.
func TestWhatWasToldToBeThereIsKept(t *testing.T) {
	now := time.Unix(1e9, 0)
	l := newLab(t, func(c *registry.Config) { c.Now = func() time.Time { return now } })
	d := digest.FromString("x")
	drop := func(want bool) {
		t.Helper()
		gone, err := l.Drop(t.Context(), d, registry.ContentKey(d), time.Hour)
		if err != nil || gone != want {
			t.Errorf("Drop: got %t, %v, want %t", gone, err, want)
		}
	}
	l.push(t, "a", []byte("x"))
	now = now.Add(2 * time.Hour)
	_, err := l.Blob(t.Context(), "a", d)
	must(t, err)
	now = now.Add(59 * time.Minute)
	drop(false)
	now = now.Add(2 * time.Minute)
	drop(true)
	_, err = l.Blob(t.Context(), "a", d)
	wantErr(t, "collected", err, registry.ErrBlobUnknown)

	l.push(t, "a", []byte("x"))
	l.open(t) // what was told before a restart is not known after it
	now = now.Add(59 * time.Minute)
	drop(false)
	now = now.Add(2 * time.Minute)
	drop(true)
}
