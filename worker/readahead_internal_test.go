package worker

import (
	"slices"
	"testing"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/worker/folder"
)

// chunky is an image of files that share chunks: /a has x, y, x, /b/c and its other
// name /b/d have y, z.
func chunky(t *testing.T) *folder.Image {
	t.Helper()
	x, y, z := chunk.Sum([]byte("x")), chunk.Sum([]byte("y")), chunk.Sum([]byte("z"))
	file := func(chunks ...chunk.Digest) *rafs.Inode {
		return &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(len(chunks)) * chunk.DefaultSize, Chunks: chunks}
	}
	dir := func(entries ...rafs.Dirent) *rafs.Inode {
		return &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: entries}
	}
	c := file(y, z)
	b, err := rafs.Encode(&rafs.Tree{ChunkSize: chunk.DefaultSize, Root: dir(
		rafs.Dirent{Name: "a", Inode: file(x, y, x)},
		rafs.Dirent{Name: "b", Inode: dir(rafs.Dirent{Name: "c", Inode: c}, rafs.Dirent{Name: "d", Inode: c})},
		rafs.Dirent{Name: "e", Inode: file()},
	)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := rafs.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return &folder.Image{Bootstrap: b, RAFS: m}
}

func TestChunksAreReadInTheFirstFileThatHasThem(t *testing.T) {
	im := chunky(t)
	want := []place{{"/a", 0}, {"/a", chunk.DefaultSize}, {"/b/c", chunk.DefaultSize}}
	for range 2 {
		if got, err := placesOf(im); err != nil || len(im.RAFS.Blob.Chunks) != len(want) || !slices.Equal(got, want) {
			t.Errorf("got %v, %v, want %v", got, err, want)
		}
		im.RAFS.Tree = nil // as it is of an image that was used before
	}
}

// What is not there, in the image or on the mount, is for the command to find out.
func TestChunksThatCannotBeReadAheadAreLeftOut(t *testing.T) {
	coming := make(chan uint32, 8)
	for _, n := range []uint32{0, 3, 1 << 31, 2, 0} {
		coming <- n
	}
	close(coming)
	readChunks(t.Context(), chunky(t), t.TempDir(), coming)
	readChunks(t.Context(), chunky(t), t.TempDir()+"/none", coming)
}
