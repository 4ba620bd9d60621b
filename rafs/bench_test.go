package rafs_test

import (
	"fmt"
	"testing"

	"quarry/rafs"
	"quarry/store/chunk"
)

// debianTree is like a Debian root file system with python3: about 12 000 files
// in directories of 20, most of one chunk.
func debianTree() *rafs.Tree {
	root, number := dir(0o755, nil), uint64(0)
	for i := range 30 {
		upper := dir(0o755, nil)
		root.Entries = append(root.Entries, rafs.Dirent{Name: fmt.Sprintf("dir%02d", i), Inode: upper})
		for j := range 20 {
			lower := dir(0o755, nil)
			upper.Entries = append(upper.Entries, rafs.Dirent{Name: fmt.Sprintf("package%02d", j), Inode: lower})
			for k := range 20 {
				number++
				n := bigFile(1+k/18, 256<<10*int64(k/18)+9000)
				for c := range n.Chunks {
					le.PutUint64(n.Chunks[c][:], number<<8|uint64(c))
				}
				lower.Entries = append(lower.Entries, rafs.Dirent{Name: fmt.Sprintf("some_module_%02d.py", k), Inode: n})
			}
		}
	}
	return &rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root}
}

func BenchmarkEncode(b *testing.B) {
	tree := debianTree()
	var boot []byte
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if boot, err = rafs.Encode(tree); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(int64(len(boot)))
}

func BenchmarkDecode(b *testing.B) {
	boot, err := rafs.Encode(debianTree())
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(boot)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := rafs.Decode(boot); err != nil {
			b.Fatal(err)
		}
	}
}
