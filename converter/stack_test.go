package converter_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"quarry/converter/layer"
	"quarry/converter/tree"
	"quarry/internal/layermodel"
	"quarry/internal/testimage"
	"quarry/rafs"
	chunks "quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/mem"
)

// FuzzLayerStack converts random layer stacks and has a plain model apply them
// too: both give one tree, or both refuse.
func FuzzLayerStack(f *testing.F) {
	for _, seed := range stackSeeds {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, p []byte) { compareStack(t, p) })
}

// stackSeeds are inputs without a story; stacks with one are in stack_story_test.go.
var stackSeeds = []string{"", "\x03\x02\x05", "layers of few names, whiteouts, links, and what stands in the way of them"}

func TestRandomStacksAreWhatTheModelSays(t *testing.T) {
	rng := rand.NewChaCha8([32]byte{3})
	const rounds = 1500
	merged, files := 0, 0
	for range rounds {
		p := make([]byte, 400)
		rng.Read(p)
		if n := compareStack(t, p); n > 0 {
			merged++
			files += n
		}
	}
	t.Logf("%d of %d stacks were accepted, with %d files", merged, rounds, files)
	if merged < rounds/4 || files < 2*merged {
		t.Error("so few stacks or files show little: mend the dice")
	}
}

// compareStack returns the number of paths in the tree, 0 when it is refused.
func compareStack(t *testing.T, p []byte) int {
	t.Helper()
	s := wildStack(p)
	want, wantErr := layermodel.Merge(s.layers...)
	got, err := convertBlobs(t.Context(), s.blobs(t))
	if (err != nil) != (wantErr != nil) {
		t.Fatalf("the converter says %v, the model %v, of\n%s", err, wantErr, listLayers(s.layers))
	}
	if err != nil {
		return 0
	}
	if diff := layermodel.Diff(got, want); diff != "" {
		t.Fatalf("the image differs from the model:\n%s of\n%s", diff, listLayers(s.layers))
	}
	return len(got)
}

// convertBlobs takes compressed layers through all that Convert does to bytes:
// layer records and chunks, records encoded and decoded, tree, bootstrap,
// decoded, and content read back from the store.
func convertBlobs(ctx context.Context, blobs [][]byte) (layermodel.Tree, error) {
	store := mem.New()
	merged, err := mergeBlobs(ctx, store, testChunk, blobs...)
	if err != nil {
		return nil, err
	}
	boot, err := rafs.Encode(merged)
	if err != nil {
		return nil, err
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		panic(fmt.Sprintf("decode what was encoded: %v", err))
	}
	if tree.Digest(im.Tree) != tree.Digest(merged) {
		panic("the bootstrap has another tree than was encoded")
	}
	return modelOf(ctx, im.Tree, store)
}

// mergeBlobs reads compressed layers into s and merges their records.
func mergeBlobs(ctx context.Context, s *mem.Store, chunkSize uint32, blobs ...[]byte) (*rafs.Tree, error) {
	m := tree.NewMerger(tree.Config{ChunkSize: chunkSize})
	for _, blob := range blobs {
		rec, err := readBlob(ctx, s, chunkSize, blob)
		if err != nil {
			return nil, err
		}
		if err := m.Apply(rec.Entries); err != nil {
			return nil, err
		}
	}
	return m.Tree(), nil
}

// readBlob returns a layer's record by way of its bytes.
func readBlob(ctx context.Context, s *mem.Store, chunkSize uint32, blob []byte) (rec *image.LayerRecord, err error) {
	err = s.Write(ctx, func(ctx context.Context, p chunks.Putter) (err error) {
		d := layer.Descriptor{Digest: chunk.Sum(blob), Size: int64(len(blob))}
		rec, err = layer.Read(ctx, bytes.NewReader(blob), d, p, layer.Config{ChunkSize: chunkSize})
		return err
	})
	if err != nil {
		return nil, err
	}
	b, err := image.EncodeLayer(rec, macKey)
	if err != nil {
		return nil, fmt.Errorf("encode the record: %w", err)
	}
	return image.DecodeLayer(b, macKey)
}

var flagOf = map[uint32]byte{
	rafs.ModeRegular: tar.TypeReg, rafs.ModeDir: tar.TypeDir, rafs.ModeSymlink: tar.TypeSymlink,
	rafs.ModeChar: tar.TypeChar, rafs.ModeBlock: tar.TypeBlock, rafs.ModeFIFO: tar.TypeFifo,
}

// modelOf is an image in the model's words, its content read from the store.
func modelOf(ctx context.Context, tr *rafs.Tree, s chunks.Getter) (layermodel.Tree, error) {
	got, nodes := layermodel.Tree{}, map[*rafs.Inode]*layermodel.Node{}
	err := tr.Walk(func(path string, n *rafs.Inode) error {
		if nodes[n] == nil {
			node, err := nodeOf(ctx, n, s)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			nodes[n] = node
		}
		got[strings.TrimPrefix(path, "/")] = nodes[n]
		return nil
	})
	return got, err
}

func nodeOf(ctx context.Context, n *rafs.Inode, s chunks.Getter) (*layermodel.Node, error) {
	node := &layermodel.Node{
		Type: flagOf[n.Type()], Mode: int64(n.Mode & rafs.ModePerm), UID: int64(n.UID), GID: int64(n.GID),
		Mtime: n.Mtime, Nsec: int64(n.MtimeNsec), Target: n.Target, Xattrs: map[string]string{},
	}
	if n.Type() == rafs.ModeChar || n.Type() == rafs.ModeBlock {
		node.Major, node.Minor = int64(n.Major()), int64(n.Minor())
	}
	for _, x := range n.Xattrs {
		node.Xattrs[x.Name] = string(x.Value)
	}
	var body bytes.Buffer
	for _, d := range n.Chunks {
		p, err := s.Get(ctx, d, nil)
		if err != nil {
			return nil, err
		}
		body.Write(p)
	}
	node.Body = body.String()
	if int64(len(node.Body)) != n.Size {
		return nil, fmt.Errorf("its chunks have %d bytes, want %d", len(node.Body), n.Size)
	}
	return node, nil
}

func listLayers(layers [][]testimage.Entry) string {
	var b strings.Builder
	for i, l := range layers {
		fmt.Fprintf(&b, "L%d\n", i+1)
		for _, e := range l {
			fmt.Fprintf(&b, "  %c %.300q -> %.300q %q mode %o owner %d:%d mtime %d device %d,%d %.300q\n",
				e.Typeflag, e.Name, e.Linkname, e.Body[:min(len(e.Body), 20)], e.Mode, e.Uid, e.Gid, e.ModTime.Unix(), e.Devmajor, e.Devminor, e.PAXRecords)
		}
	}
	return b.String()
}
