package blockdev

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"golang.org/x/sync/semaphore"

	"quarry/rafs"
	"quarry/store/chunk"
)

// firstOnly answers the first chunk of a request, and hangs.
type firstOnly map[chunk.Digest][]byte

func (s firstOnly) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	if err := fn(ds[0], s[ds[0]], nil); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// TestStalledNeighboursTakeNothingFromReads: the bytes that reads may wait for are
// given back when they have their chunk, though the request goes on.
func TestStalledNeighboursTakeNothingFromReads(t *testing.T) {
	s := firstOnly{}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	for k := range uint64(8) {
		p := plainOf(k, blockSize)
		s[chunk.Sum(p)] = p
		f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: blockSize, Chunks: []chunk.Digest{chunk.Sum(p)}}
		root.Entries = append(root.Entries, rafs.Dirent{Name: fmt.Sprint(k), Inode: f})
	}
	boot, err := rafs.Encode(&rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root})
	if err != nil {
		t.Fatal(err)
	}
	img, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		d, err := New(Config{Bootstrap: boot, Image: img, Chunks: s, GroupBytes: 2 * blockSize, Alone: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		d.budget = semaphore.NewWeighted(blockSize) // room for one read
		for i := 0; i < 8; i += 2 {
			if err := d.ReadAt(t.Context(), make([]byte, 1), d.mapped+d.chunks[i].DevOff); err != nil {
				t.Errorf("chunk %d: %v", i, err)
			}
		}
	})
}
