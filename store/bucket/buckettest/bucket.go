// Package buckettest says in tests what package bucket says in prose: every
// implementation and every decorator of Bucket and Journal runs these suites.
// It also offers faults to the tests of the packages above.
package buckettest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
)

// Put stores p or fails the test.
func Put(t testing.TB, b bucket.Bucket, key string, p []byte) {
	t.Helper()
	if err := b.Put(context.Background(), key, bytes.NewReader(p), int64(len(p))); err != nil {
		t.Fatalf("Put(%s): %v", key, err)
	}
}

// Bytes returns a whole object or fails the test.
func Bytes(t testing.TB, b bucket.Bucket, key string) []byte {
	t.Helper()
	o, err := b.Stat(context.Background(), key)
	if err != nil {
		t.Fatalf("Stat(%s): %v", key, err)
	}
	p := make([]byte, o.Size)
	if err := b.ReadAt(context.Background(), key, p, 0); err != nil {
		t.Fatalf("ReadAt(%s): %v", key, err)
	}
	return p
}

// Keys returns the keys with the prefix, as listed, or fails the test.
func Keys(t testing.TB, b bucket.Bucket, prefix string) []string {
	t.Helper()
	keys := []string{}
	for o, err := range b.List(context.Background(), prefix) {
		if err != nil {
			t.Fatalf("List(%q): %v", prefix, err)
		}
		keys = append(keys, o.Key)
	}
	return keys
}

// Run tests a bucket; open returns a new, empty one for each test.
func Run(t *testing.T, open func(t *testing.T) bucket.Bucket) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, bucket.Bucket)
	}{
		{"an object is read back whole and in parts", testRead},
		{"an empty object is an object", testEmpty},
		{"a large object comes back", testLarge},
		{"a missing object is ErrNotFound", testNotFound},
		{"a read past the end is ErrUnexpectedEOF", testShort},
		{"a put replaces the object", testReplace},
		{"a put that fails changes nothing", testFailedPut},
		{"a delete removes one object", testDelete},
		{"a list has the keys with the prefix in order", testList},
		{"a list can be left early", testListBreak},
		{"keys that are no keys are refused", testKeys},
		{"the longest key is a key", testLongKeys},
		{"a cancelled context stops every call", testCancelled},
		{"readers see the old or the new object", testConcurrentReplace},
		{"many keys at once", testConcurrentKeys},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, open(t)) })
	}
}

func wantErr(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got error %v, want %v", what, got, want)
	}
}

func wantBytes(t *testing.T, b bucket.Bucket, key string, want []byte) {
	t.Helper()
	if got := Bytes(t, b, key); !bytes.Equal(got, want) {
		t.Errorf("%s: got %d bytes %.20q…, want %d bytes %.20q…", key, len(got), got, len(want), want)
	}
}

func wantKeys(t *testing.T, b bucket.Bucket, prefix string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(append([]string{}, want...), Keys(t, b, prefix)); diff != "" {
		t.Errorf("List(%q) (-want +got):\n%s", prefix, diff)
	}
}

// pattern returns n bytes that differ at every offset a mistake could confuse.
func pattern(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i) ^ byte(i>>8) ^ byte(i>>16)
	}
	return p
}

func testRead(t *testing.T, b bucket.Bucket) {
	want := pattern(1000)
	Put(t, b, "packs/one", want)
	wantBytes(t, b, "packs/one", want)
	for _, r := range [][2]int{{0, 1}, {1, 999}, {999, 1}, {500, 20}, {0, 0}} {
		got := make([]byte, r[1])
		if err := b.ReadAt(t.Context(), "packs/one", got, int64(r[0])); err != nil {
			t.Errorf("ReadAt %d, %d bytes: %v", r[0], r[1], err)
		}
		if !bytes.Equal(got, want[r[0]:r[0]+r[1]]) {
			t.Errorf("ReadAt %d, %d bytes: wrong bytes", r[0], r[1])
		}
	}
	got, err := b.Stat(t.Context(), "packs/one")
	if want := (bucket.Object{Key: "packs/one", Size: 1000}); err != nil || got != want {
		t.Errorf("Stat: got %+v, %v, want %+v", got, err, want)
	}
}

func testEmpty(t *testing.T, b bucket.Bucket) {
	Put(t, b, "configs/empty", nil)
	wantBytes(t, b, "configs/empty", nil)
	wantKeys(t, b, "", "configs/empty")
	err := b.ReadAt(t.Context(), "configs/empty", make([]byte, 1), 0)
	wantErr(t, "ReadAt of 1 byte", err, io.ErrUnexpectedEOF)
}

func testLarge(t *testing.T, b bucket.Bucket) {
	want := pattern(9<<20 + 1) // more than any buffer or S3 part in use
	Put(t, b, "packs/large", want)
	wantBytes(t, b, "packs/large", want)
}

func testNotFound(t *testing.T, b bucket.Bucket) {
	Put(t, b, "a/b", []byte("x"))
	for _, key := range []string{"nothing", "a", "a/c", "a/b/c", "a/bb"} {
		_, err := b.Stat(t.Context(), key)
		wantErr(t, "Stat "+key, err, bucket.ErrNotFound)
		wantErr(t, "ReadAt "+key, b.ReadAt(t.Context(), key, make([]byte, 1), 0), bucket.ErrNotFound)
		if err := b.Delete(t.Context(), key); err != nil {
			t.Errorf("Delete %s: %v", key, err)
		}
	}
	wantBytes(t, b, "a/b", []byte("x"))
}

func testShort(t *testing.T, b bucket.Bucket) {
	Put(t, b, "a", pattern(10))
	for _, r := range []struct {
		off int64
		n   int
	}{{0, 11}, {9, 2}, {10, 1}, {11, 1}, {1 << 40, 1}} {
		err := b.ReadAt(t.Context(), "a", make([]byte, r.n), r.off)
		wantErr(t, fmt.Sprintf("ReadAt %d, %d bytes", r.off, r.n), err, io.ErrUnexpectedEOF)
	}
	for _, off := range []int64{-1, math.MinInt64, math.MaxInt64} {
		if err := b.ReadAt(t.Context(), "a", make([]byte, 8), off); err == nil {
			t.Errorf("ReadAt %d: got no error", off)
		}
	}
}

func testReplace(t *testing.T, b bucket.Bucket) {
	for _, n := range []int{100, 100, 7, 200, 0, 1} {
		want := pattern(n)
		Put(t, b, "a/b", want)
		wantBytes(t, b, "a/b", want)
	}
	wantKeys(t, b, "", "a/b")
}

// failingBody gives one byte less than promised, or an error in the middle.
type failingBody struct {
	size int64
	err  error
}

func (f failingBody) ReadAt(p []byte, off int64) (int, error) {
	if n := f.size - off; n < int64(len(p)) {
		return int(max(n, 0)), f.err
	}
	return len(p), nil
}

func testFailedPut(t *testing.T, b bucket.Bucket) {
	Put(t, b, "old", []byte("old"))
	broken := errors.New("broken disk")
	const size = 5 << 20
	for _, key := range []string{"old", "new", "folder/new"} {
		err := b.Put(t.Context(), key, failingBody{size - 1, io.EOF}, size)
		wantErr(t, "Put of a short body", err, io.ErrUnexpectedEOF)
		err = b.Put(t.Context(), key, failingBody{size / 2, broken}, size)
		wantErr(t, "Put of a broken body", err, broken)
		if err := b.Put(t.Context(), key, failingBody{}, -1); err == nil {
			t.Error("Put of size -1: got no error")
		}
		ctx, cancel := context.WithCancel(t.Context())
		err = b.Put(ctx, key, cancellingBody{cancel}, size)
		wantErr(t, "Put cancelled while the body is read", err, context.Canceled)
	}
	wantKeys(t, b, "", "old")
	wantBytes(t, b, "old", []byte("old"))
}

type cancellingBody struct{ cancel func() }

func (c cancellingBody) ReadAt(p []byte, off int64) (int, error) {
	c.cancel()
	return len(p), nil
}

func testDelete(t *testing.T, b bucket.Bucket) {
	for _, key := range []string{"a/b", "a/c", "a.b"} {
		Put(t, b, key, []byte(key))
	}
	if err := b.Delete(t.Context(), "a/b"); err != nil {
		t.Fatal(err)
	}
	_, err := b.Stat(t.Context(), "a/b")
	wantErr(t, "Stat after Delete", err, bucket.ErrNotFound)
	err = b.ReadAt(t.Context(), "a/b", make([]byte, 1), 0)
	wantErr(t, "ReadAt after Delete", err, bucket.ErrNotFound)
	wantKeys(t, b, "", "a.b", "a/c")
	if err := b.Delete(t.Context(), "a/b"); err != nil {
		t.Errorf("second Delete: %v", err)
	}
	Put(t, b, "a/b", []byte("again"))
	wantBytes(t, b, "a/b", []byte("again"))
}

func testList(t *testing.T, b bucket.Bucket) {
	// Bytewise order of whole keys: '+' and '-' and '.' are before '/'.
	keys := []string{"a+b", "a-b/c", "a.b", "a/b", "a/b-c", "a0", "b/c/d/e", "b/c/d0", "b/cc/x", "c"}
	for _, i := range []int{4, 1, 9, 0, 7, 3, 8, 2, 6, 5} {
		Put(t, b, keys[i], pattern(i))
	}
	wantKeys(t, b, "", keys...)
	wantKeys(t, b, "a", keys[:6]...)
	wantKeys(t, b, "a/", "a/b", "a/b-c")
	wantKeys(t, b, "a/b", "a/b", "a/b-c")
	wantKeys(t, b, "a/b-", "a/b-c")
	wantKeys(t, b, "b/c", "b/c/d/e", "b/c/d0", "b/cc/x")
	wantKeys(t, b, "b/c/d/e", "b/c/d/e")
	for _, none := range []string{"d", "a/b/", "c/", "/", "//", "../", ".", "a/../a/", "\x00", "a/./", "log/", "tmp/"} {
		wantKeys(t, b, none)
	}
	for o, err := range b.List(t.Context(), "b/c/d0") {
		if want := (bucket.Object{Key: "b/c/d0", Size: 7}); err != nil || o != want {
			t.Errorf("List: got %+v, %v, want %+v", o, err, want)
		}
	}
}

func testListBreak(t *testing.T, b bucket.Bucket) {
	for _, key := range []string{"a/1", "a/2", "b/1"} {
		Put(t, b, key, nil)
	}
	var got []string
	for o := range b.List(t.Context(), "") {
		if got = append(got, o.Key); len(got) == 2 {
			break
		}
	}
	if want := []string{"a/1", "a/2"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func testKeys(t *testing.T, b bucket.Bucket) {
	bad := []string{
		"", "/", "a/", "/a", "a//b", ".", "..", "a/.", "../a", "a/../b", "a/..", "/etc/passwd",
		"log/00000000000000000001", "log", "tmp/1", "tmp", "a\x00b", "a\nb", "a b", `a\b`, "a%2e", "ä", "a*", "a?",
		strings.Repeat("a", bucket.MaxElement+1), "b/" + strings.Repeat("a/", bucket.MaxKey/2),
	}
	for _, key := range bad {
		if err := b.Put(t.Context(), key, bytes.NewReader([]byte("x")), 1); err == nil {
			t.Errorf("Put(%q): got no error", key)
		}
		if err := b.ReadAt(t.Context(), key, make([]byte, 1), 0); err == nil || errors.Is(err, bucket.ErrNotFound) {
			t.Errorf("ReadAt(%q): got error %v, want one that refuses the key", key, err)
		}
		if _, err := b.Stat(t.Context(), key); err == nil || errors.Is(err, bucket.ErrNotFound) {
			t.Errorf("Stat(%q): got error %v, want one that refuses the key", key, err)
		}
		if err := b.Delete(t.Context(), key); err == nil {
			t.Errorf("Delete(%q): got no error", key)
		}
	}
	wantKeys(t, b, "")
	good := []string{"...", ".hidden/..x", "a@sha256:0", "b=1+2", "x/log", "x/tmp", "z_Z"}
	slices.Sort(good)
	for _, key := range good {
		Put(t, b, key, []byte(key))
	}
	wantKeys(t, b, "", good...)
}

func testLongKeys(t *testing.T, b bucket.Bucket) {
	long := strings.Repeat(strings.Repeat("k", bucket.MaxElement)+"/", bucket.MaxKey/(bucket.MaxElement+1))
	long = long[:bucket.MaxKey-1]
	for _, key := range []string{strings.Repeat("e", bucket.MaxElement), long} {
		Put(t, b, key, []byte("x"))
		wantBytes(t, b, key, []byte("x"))
		wantKeys(t, b, key, key)
	}
}

func testCancelled(t *testing.T, b bucket.Bucket) {
	Put(t, b, "a", []byte("x"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, "Put", b.Put(ctx, "b", bytes.NewReader([]byte("x")), 1), context.Canceled)
	wantErr(t, "ReadAt", b.ReadAt(ctx, "a", make([]byte, 1), 0), context.Canceled)
	_, err := b.Stat(ctx, "a")
	wantErr(t, "Stat", err, context.Canceled)
	wantErr(t, "Delete", b.Delete(ctx, "a"), context.Canceled)
	for _, prefix := range []string{"", "nothing/"} { // a cancelled list must not look empty
		err = nil
		for _, err = range b.List(ctx, prefix) {
		}
		wantErr(t, "List", err, context.Canceled)
	}
	wantKeys(t, b, "", "a")
}

func testConcurrentReplace(t *testing.T, b bucket.Bucket) {
	const size = 64 << 10
	versions := [][]byte{bytes.Repeat([]byte{'a'}, size), bytes.Repeat([]byte{'b'}, size)}
	Put(t, b, "a/b", versions[0])
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 5 {
				if err := b.Put(t.Context(), "a/b", bytes.NewReader(versions[i%2]), size); err != nil {
					t.Errorf("Put: %v", err)
				}
			}
		})
		wg.Go(func() {
			p := make([]byte, size)
			for range 50 {
				if err := b.ReadAt(t.Context(), "a/b", p, 0); err != nil {
					t.Errorf("ReadAt: %v", err)
				}
				if !bytes.Equal(p, versions[0]) && !bytes.Equal(p, versions[1]) {
					t.Errorf("ReadAt: a mixture of two objects")
				}
			}
		})
	}
	wg.Wait()
}

func testConcurrentKeys(t *testing.T, b bucket.Bucket) {
	var wg sync.WaitGroup
	var want []string
	for i := range 16 {
		key := fmt.Sprintf("folder/%02d/object", i)
		if i%2 == 0 {
			want = append(want, key)
		}
		wg.Go(func() {
			Put(t, b, key, []byte(key))
			wantBytes(t, b, key, []byte(key))
			Keys(t, b, "folder/")
			if i%2 == 1 {
				if err := b.Delete(t.Context(), key); err != nil {
					t.Errorf("Delete: %v", err)
				}
			}
		})
	}
	wg.Wait()
	wantKeys(t, b, "folder/", want...)
}
