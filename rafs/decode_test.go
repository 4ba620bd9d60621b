package rafs_test

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"testing"

	"quarry/rafs"
	"quarry/store/chunk"
)

// checkDecode holds Decode to its contract for any input and returns its error.
func checkDecode(t *testing.T, b []byte) error {
	t.Helper()
	m, err := rafs.Decode(b)
	if err != nil {
		var bad *rafs.FormatError
		if !errors.As(err, &bad) || bad.Off < 0 || bad.Off > int64(len(b)) || m != nil {
			t.Fatalf("got %v with image %v, want a FormatError inside %d bytes alone", err, m, len(b))
		}
		return err
	}
	again, err := rafs.Encode(m.Tree)
	if err != nil || !bytes.Equal(again, b) {
		t.Fatalf("accepted %d bytes, encoded again they are %d others, error %v", len(b), len(again), err)
	}
	return nil
}

// TestEveryByteCounts changes a bit in each byte of a bootstrap that has one of
// everything. It is refused, or it is the bootstrap of another tree.
func TestEveryByteCounts(t *testing.T) {
	boot, _ := smallSample().encode(t)
	refused := 0
	for i := range boot {
		boot[i] ^= 1 << (i % 8)
		if checkDecode(t, boot) != nil {
			refused++
		}
		boot[i] ^= 1 << (i % 8)
	}
	if refused < len(boot)*9/10 || refused == len(boot) {
		t.Errorf("refused %d of %d changed bootstraps", refused, len(boot))
	}
}

func TestTruncatedAndLonger(t *testing.T) {
	boot, _ := smallSample().encode(t)
	for size := 0; size < len(boot); size += 512 {
		if checkDecode(t, boot[:size]) == nil {
			t.Errorf("accepted the first %d bytes", size)
		}
	}
	if checkDecode(t, append(boot, make([]byte, 4096)...)) == nil {
		t.Error("accepted a block too many")
	}
}

func TestFileBytesCountsAHardLinkOnce(t *testing.T) {
	s := newSample(4096)
	a, b := s.file(make([]byte, 5000)), s.file([]byte("b"))
	link := &rafs.Inode{Mode: rafs.ModeSymlink | 0o777, Target: "a"}
	s.tree.Root = &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{
		{Name: "a", Inode: a}, {Name: "again", Inode: a}, {Name: "b", Inode: b}, {Name: "link", Inode: link},
	}}
	_, im := s.encode(t)
	if got := im.FileBytes(); got != 5001 {
		t.Errorf("got %d bytes, want 5001", got)
	}
}

// TestHostileBootstraps damages one place each and expects the error to name it.
func TestHostileBootstraps(t *testing.T) {
	const root, first = 8192, 8192 + 64 // the root and its block of entries
	for _, c := range []struct {
		name   string
		damage func(b []byte)
		want   string
	}{
		{"another file system", func(b []byte) { copy(b[1024:], "EXT4") }, "EROFS magic"},
		{"compressed EROFS", func(b []byte) { le.PutUint32(b[1024+80:], 0x0D) }, "feature_incompat is 0xd, want 0xc"},
		{"BLAKE3", func(b []byte) { b[1152] ^= 0x0C }, "RAFS flags"},
		{"chunk size", func(b []byte) { le.PutUint32(b[1152+20:], 5000) }, "chunk size is 5000"},
		{"chunk table far away", func(b []byte) { le.PutUint64(b[1152+24:], 1<<62) }, "chunk table"},
		{"chunk table without end", func(b []byte) { le.PutUint64(b[1152+32:], 1<<63) }, "chunk table"},
		{"other blob id", func(b []byte) { b[4096] ^= 1 }, "at byte 4096"},
		{"root is a file", func(b []byte) { le.PutUint16(b[root+4:], rafs.ModeRegular|0o755) }, "format"},
		{"root is huge", func(b []byte) { le.PutUint64(b[root+8:], 1<<40) }, "size is 1099511627776"},
		{"negative size", func(b []byte) { le.PutUint64(b[root+8:], 1<<64-1) }, "size is 18446744073709551615"},
		{"48-bit layout", func(b []byte) { b[root] |= 0x10 }, "inode format"},
		{"directory in itself", func(b []byte) { copy(b[first+3*12:first+3*12+8], b[first+12:]) }, "want it at"},
		{"wrong parent", func(b []byte) { b[first+2*12]++ }, `entry ".." has nid`},
		{"hard link that is none", func(b []byte) { copy(b[first:first+8], b[first+4*12:]) }, "want it at"},
		{"entry of no inode", func(b []byte) { le.PutUint64(b[first:], 1<<60) }, "outside the file"},
		{"nid just at the end", func(b []byte) { le.PutUint64(b[first:], uint64(len(b)-4096)/32-1) }, "outside the file"},
		{"name before its block", func(b []byte) { le.PutUint16(b[first+12+8:], 3) }, "name is empty"},
		{"names in no order", func(b []byte) { b[first+7*12] = 'z' }, "does not sort after"},
		{"no entries", func(b []byte) { le.PutUint16(b[first+8:], 0) }, "first name"},
		{"inode number", func(b []byte) { b[root+20]++ }, "at byte 8212"},
		{"links", func(b []byte) { b[root+44]++ }, "at byte 8236"},
		{"reserved byte", func(b []byte) { b[root+63] = 1 }, "at byte 8255"},
		{"padding", func(b []byte) { b[4095] = 1 }, "at byte 4095"},
	} {
		boot, _ := smallSample().encode(t)
		c.damage(boot)
		if err := checkDecode(t, boot); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", c.name, err, c.want)
		}
	}
}

// TestHostileDepth turns the symlink at the end of the deepest tree into a
// directory of the same size.
func TestHostileDepth(t *testing.T) {
	s := newSample(4096)
	s.tree.Root = deepDir(rafs.MaxDepth - 1)
	boot, _ := s.encode(t)
	at := bytes.LastIndex(boot, []byte(strings.Repeat("t", 27)))
	h := boot[at-64:]
	le.PutUint16(h[4:], rafs.ModeDir|0o777)
	copy(h[64:], make([]byte, 27))
	le.PutUint64(h[64:], uint64(at-64-4096)/32)
	le.PutUint16(h[64+8:], 24)
	le.PutUint16(h[64+12+8:], 25)
	parent := bytes.LastIndexByte(boot[:at-64], 'l') // its one entry's name
	le.PutUint64(h[64+12:], uint64((parent-3-3*12-64-4096)/32))
	copy(h[64+24:], "...")
	if err := checkDecode(t, boot); err == nil || !strings.Contains(err.Error(), "nested deeper than the limit of 4096") {
		t.Errorf("got %v, want an error about the depth", err)
	}
}

// TestMemoryIsProportional decodes bootstraps whose inodes claim each other's
// bytes, the cheapest way to make a reader allocate more than it was given.
func TestMemoryIsProportional(t *testing.T) {
	s := newSample(4096)
	var files []rafs.Dirent
	for range 100 {
		n := s.file(bytes.Repeat([]byte("x"), 4096))
		files = append(files, rafs.Dirent{Name: string([]byte{byte('0' + len(files)/10), byte('0' + len(files)%10)}), Inode: n})
	}
	tail := bigFile(1, 4096)
	for range 50_000 {
		tail.Chunks = append(tail.Chunks, tail.Chunks[0])
	}
	tail.Size = int64(len(tail.Chunks)) * 4096
	s.tree.Root.Entries = append(files, rafs.Dirent{Name: "z", Inode: tail})
	boot, _ := s.encode(t)
	honest := allocated(func() { rafs.Decode(boot) })
	for off := 8192; off < 8192+4096*4; off += 32 {
		if le.Uint16(boot[off:]) == 9 && le.Uint64(boot[off+8:]) == 4096 {
			le.PutUint64(boot[off+8:], 40_000*4096) // now every file has most of the last one's indexes
		}
	}
	if checkDecode(t, boot) == nil {
		t.Error("accepted overlapping inodes")
	}
	hostile := allocated(func() { rafs.Decode(boot) })
	if honest > 32*uint64(len(boot)) || hostile > 32*uint64(len(boot)) {
		t.Errorf("decoding %d bytes allocated %d, hostile %d", len(boot), honest, hostile)
	}
}

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func FuzzDecode(f *testing.F) {
	for _, s := range []*sample{smallSample(), newSample(4096)} {
		boot, _ := s.encode(f)
		f.Add(boot)
	}
	f.Fuzz(func(t *testing.T, b []byte) { checkDecode(t, b) })
}

// FuzzPatched changes four bytes of a good bootstrap, which reaches deeper than
// random bytes do.
func FuzzPatched(f *testing.F) {
	s := randomSample(3, 120)
	s.tree.Root.Entries = append(s.tree.Root.Entries, rafs.Dirent{Name: "\xff\xffwide", Inode: exactDir(9000, 1)})
	boot, _ := s.encode(f)
	f.Add(uint32(8192), uint32(1))
	f.Add(uint32(1152), uint32(1<<31))
	f.Add(uint32(len(boot)-4096), uint32(7))
	f.Fuzz(func(t *testing.T, off, patch uint32) {
		b := bytes.Clone(boot)
		at := int(off) % (len(b) - 4)
		le.PutUint32(b[at:], le.Uint32(b[at:])^patch)
		checkDecode(t, b)
	})
}

// TestImageDoesNotKeepItsInput overwrites the input after decoding.
func TestImageDoesNotKeepItsInput(t *testing.T) {
	s := edgeSample()
	boot, m := s.encode(t)
	m2, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	for i := range boot {
		boot[i] = 0xee
	}
	if err := sameTree(m2.Tree, m.Tree); err != nil {
		t.Error(err)
	}
	if m2.Blob.Chunks[0] != m.Blob.Chunks[0] || m.Blob.Chunks[0].Digest == (chunk.Digest{}) {
		t.Error("chunks changed with the input")
	}
}

// TestBlocksInOrder swaps and moves the blocks of directories.
func TestBlocksInOrder(t *testing.T) {
	s := newSample(4096)
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{"a": exactDir(9000, 1), "b": exactDir(9000, 2)})
	for name, damage := range map[string]func(a, b []byte){
		"shared":        func(a, b []byte) { copy(b, a[:4]) },
		"in the inodes": func(a, b []byte) { le.PutUint32(a, 2) },
		"far away":      func(a, b []byte) { le.PutUint32(a, 1<<31) },
	} {
		boot, m := s.encode(t)
		if m.Size != 8192+4096+4*4096 {
			t.Fatalf("bootstrap has %d bytes", m.Size)
		}
		var dirs []int
		for off := 8192 + 64; off < 12288; off += 32 {
			if le.Uint16(boot[off:]) == 5 && le.Uint64(boot[off+8:]) > 8192 {
				dirs = append(dirs, off+16)
			}
		}
		damage(boot[dirs[0]:], boot[dirs[1]:])
		if checkDecode(t, boot) == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
