package converter_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/converter"
	"quarry/converter/proof"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/image"
	"quarry/store/pack"
)

// noise is content that does not compress, so that all its chunks are stored
// with the same length.
func noise(seed byte) string {
	p := make([]byte, 2*testChunk)
	rand.NewChaCha8([32]byte{seed}).Read(p)
	return string(p)
}

// fresh is a layer all of whose content is new beside base; upper hides a file
// of it.
var (
	fresh = layerOf(testimage.File("usr/a", noise(1)), testimage.File("usr/b", noise(2)), testimage.File("usr/hidden", noise(3)))
	upper = layerOf(testimage.File("usr/.wh.hidden", ""))
)

// failure returns the record of img:latest.
func (s *store) failure(t *testing.T) (image.Failure, bool) {
	t.Helper()
	key := image.FailureKey("img", "latest")
	if len(buckettest.Keys(t, s.mem, key)) == 0 {
		return image.Failure{}, false
	}
	f, err := image.DecodeFailure(buckettest.Bytes(t, s.mem, key))
	if err != nil {
		t.Fatal(err)
	}
	return f, true
}

// packBytes returns a pack of the bucket and its entries.
func packBytes(t *testing.T, b *mem.Bucket, key string) ([]byte, []pack.Entry) {
	t.Helper()
	p := buckettest.Bytes(t, b, key)
	entries, err := pack.ReadFooter(bytes.NewReader(p), int64(len(p)))
	if err != nil {
		t.Fatal(err)
	}
	return p, entries
}

func TestWhatIsDamagedOnTheWayIsNotPublished(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, s *store, key string, p []byte, e []pack.Entry){
		"a flipped byte": func(t *testing.T, s *store, key string, p []byte, e []pack.Entry) {
			buckettest.Corrupt(t, s.mem, key, e[0].Off+100)
		},
		"swapped chunks": func(t *testing.T, s *store, key string, p []byte, e []pack.Entry) {
			first := bytes.Clone(p[e[0].Off:][:e[0].Stored])
			copy(p[e[0].Off:], p[e[2].Off:][:e[2].Stored])
			copy(p[e[2].Off:], first)
			buckettest.Put(t, s.mem, key, p)
		},
		"a missing pack": func(t *testing.T, s *store, key string, p []byte, e []pack.Entry) {
			if err := s.mem.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		},
		"an index that takes one chunk for another": func(t *testing.T, s *store, key string, p []byte, e []pack.Entry) {
			id := s.Catalog.Packs()[len(s.Catalog.Packs())-1].ID
			if _, err := s.index.DropPack(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			e[0].Digest, e[2].Digest = e[2].Digest, e[0].Digest
			if err := s.index.InsertBatch(t.Context(), id, e); err != nil {
				t.Fatal(err)
			}
		},
		"only what an upper layer hides": func(t *testing.T, s *store, key string, p []byte, e []pack.Entry) {
			buckettest.Corrupt(t, s.mem, key, e[len(e)-1].Off)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := mem.New()
			faulty := &buckettest.Faulty{}
			s := openStore(t, b, faulty)
			s.convert(t, testimage.Build(t, base).Source(""))
			before := s.objects(t)
			stored := ""
			faulty.Before = func(op buckettest.Op) error {
				switch {
				case op.Method == "Put" && strings.HasPrefix(op.Key, "packs/"):
					stored = op.Key
				case op.Method == "Put" && strings.HasPrefix(op.Key, image.LayersPrefix) && stored != "":
					p, e := packBytes(t, b, stored) // journal and index know it by now
					damage(t, s, stored, p, e)
					stored = ""
				}
				return nil
			}
			src := testimage.Build(t, fresh, upper).Source("")
			s.fail(t, src, "nothing was published")
			faulty.Before = nil
			for key := range s.objects(t) {
				if before[key] == "" && !strings.HasPrefix(key, image.LayersPrefix) {
					t.Errorf("object %s was left", key)
				}
			}
			if f, ok := s.failure(t); !ok || f.State != image.FailureFailed || f.Blame != image.BlameStore || !strings.Contains(f.Reason, "nothing was published") {
				t.Errorf("failure %+v", f)
			}
			s.verified(t, latest) // the older image

			again := openStore(t, b, nil)
			again.convert(t, src)
			again.verified(t, latest)
			if f, ok := again.failure(t); ok {
				t.Errorf("after a success there is still %+v", f)
			}
		})
	}
}

// A bug in the encoder, which everything else would take for the image.
func TestABootstrapOfAnotherTreeIsNotPublished(t *testing.T) {
	file := func(root *rafs.Inode, name string) *rafs.Inode {
		for _, d := range root.Entries[0].Inode.Entries {
			if d.Name == name {
				return d.Inode
			}
		}
		t.Fatalf("no file %s", name)
		return nil
	}
	for name, alter := range map[string]func(root *rafs.Inode){
		"nothing":      func(*rafs.Inode) {},
		"another mode": func(root *rafs.Inode) { root.Mode ^= 1 },
		"content swapped": func(root *rafs.Inode) {
			a, b := file(root, "a"), file(root, "b")
			a.Chunks, b.Chunks = b.Chunks, a.Chunks
		},
		"a file less": func(root *rafs.Inode) { usr := root.Entries[0].Inode; usr.Entries = usr.Entries[1:] },
		"a hard link": func(root *rafs.Inode) {
			usr := root.Entries[0].Inode
			usr.Entries[1].Inode = usr.Entries[0].Inode
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			st := s.convert(t, testimage.Build(t, fresh).Source("")).Statement
			before := s.objects(t)
			im, err := rafs.Decode(buckettest.Bytes(t, s.mem, image.BootstrapKey(st.Bootstrap)))
			if err != nil {
				t.Fatal(err)
			}
			alter(im.Tree.Root)
			boot, err := rafs.Encode(im.Tree)
			if err != nil {
				t.Fatal(err)
			}
			config := buckettest.Bytes(t, s.mem, image.ConfigKey(st.Config))
			err = converter.Publish(t.Context(), s.Config, st, config, boot, st.Tree)
			switch {
			case name == "nothing" && err != nil:
				t.Errorf("the image itself is refused: %v", err)
			case name != "nothing" && (!errors.Is(err, proof.ErrTree) || !strings.Contains(err.Error(), "nothing was published")):
				t.Errorf("got %v", err)
			}
			if diff := cmp.Diff(s.objects(t), before); diff != "" {
				t.Errorf("objects (-after +before):\n%s", diff)
			}
		})
	}
}

// What a conversion stored that did not end well is read when the name is
// converted again, though by then it is known.
func TestAnInterruptedConversionIsProvedByTheNext(t *testing.T) {
	b := mem.New()
	faulty := &buckettest.Faulty{}
	s := openStore(t, b, faulty)
	faulty.Before = func(op buckettest.Op) error {
		if op.Method == "Put" && (strings.HasPrefix(op.Key, "bootstraps/") || strings.HasPrefix(op.Key, image.FailuresPrefix) && len(buckettest.Keys(t, b, image.LayersPrefix)) > 0) {
			return errors.New("the machine is off") // and the reason cannot be written either
		}
		return nil
	}
	src := testimage.Build(t, fresh).Source("")
	s.fail(t, src, "the machine is off")
	if f, ok := s.failure(t); !ok || f.State != image.FailureUnfinished || f.Reason != "" {
		t.Fatalf("failure %+v", f)
	}
	key := buckettest.Keys(t, b, "packs/")[0]
	_, entries := packBytes(t, b, key)
	buckettest.Corrupt(t, b, key, entries[1].Off)

	again := openStore(t, b, nil)
	again.fail(t, src, "/usr/a", "nothing was published")
	if f, _ := again.failure(t); f.State != image.FailureFailed || !strings.Contains(f.Reason, "/usr/a") {
		t.Errorf("failure %+v", f)
	}
	again.convert(t, src) // the damaged chunk was condemned, and is stored anew
	again.verified(t, latest)
}

// The same holds for an image that was published long before: that each layer is
// known and each object whole is not enough after a failure.
func TestAPublishedImageIsProvedAfterAFailure(t *testing.T) {
	s := newStore(t)
	src := testimage.Build(t, fresh).Source("")
	first := s.convert(t, src)
	key := buckettest.Keys(t, s.mem, "packs/")[0]
	_, entries := packBytes(t, s.mem, key)
	buckettest.Corrupt(t, s.mem, key, entries[1].Off)
	s.convert(t, src) // it is ready, and nobody doubts it
	s.fail(t, testimage.Build(t, layerOf(testimage.File("d/..", "x"))).Source(""), "d/..")
	s.fail(t, src, "/usr/a", "could not be proved")
	if again := s.convert(t, src); again.ImageID != first.ImageID || again.LayersReused != 0 {
		t.Errorf("the third conversion gave %+v, want the image of the first with the layer read again", again)
	}
	s.verified(t, latest)
}

func TestAFailureIsKeptUntilAConversionSucceeds(t *testing.T) {
	b := mem.New()
	s := openStore(t, b, nil)
	broken := testimage.Build(t, layerOf(testimage.File("ok", "x")), layerOf(testimage.File("d/..", "x"))).Source("")
	s.fail(t, broken, "d/..")
	want := image.Failure{
		Repo: "img", Tag: "latest", State: image.FailureFailed, Source: broken, Converter: converter.Version,
		Time: now, Blame: image.BlameInput,
	}
	s = openStore(t, b, nil) // as after a restart
	got, ok := s.failure(t)
	if !ok || got.Digest == nil || !strings.Contains(got.Reason, "layer 2 of 2") || !strings.Contains(got.Reason, "d/..") {
		t.Fatalf("failure %+v", got)
	}
	got.Digest, got.Reason = nil, ""
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("failure (-got +want):\n%s", diff)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := converter.Convert(ctx, s.Config, request(broken)); err == nil {
		t.Fatal("a cancelled conversion succeeded")
	}
	if f, _ := s.failure(t); f.Blame != image.BlameCaller {
		t.Errorf("blame %q, want the caller's", f.Blame)
	}
	s.convert(t, testimage.Build(t, base).Source(""))
	if f, ok := s.failure(t); ok {
		t.Errorf("after a success there is still %+v", f)
	}
}
