package rafs_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/bits"
	"os"
	"strings"
	"testing"

	"quarry/rafs"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var le = binary.LittleEndian

// TestGolden pins every byte of a small bootstrap and of its virtual blob's
// tail. A difference is a new version of the format.
func TestGolden(t *testing.T) {
	s := smallSample()
	boot, m := s.encode(t)
	checkGolden(t, "testdata/bootstrap.golden", dumpBootstrap(boot))
	checkGolden(t, "testdata/tail.golden", dumpTail(m.Blob))
}

func checkGolden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got == string(want) {
		return
	}
	gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(want), "\n")
	for i := range gotLines {
		if i >= len(wantLines) || gotLines[i] != wantLines[i] {
			t.Fatalf("%s, line %d:\ngot  %s\nwant %s", file, i+1, gotLines[i], wantLines[min(i, len(wantLines)-1)])
		}
	}
	t.Fatalf("%s has %d more lines", file, len(wantLines)-len(gotLines))
}

// dumper writes an annotated hex dump. Bytes that nobody annotated are counted
// when they are zero and shown as "?" when not, so a forgotten field stands out.
type dumper struct {
	b     []byte
	notes map[int]note
}

type note struct {
	size int
	text string
}

func (d *dumper) note(off, size int, format string, args ...any) {
	d.notes[off] = note{size, fmt.Sprintf(format, args...)}
}

// fields annotates integers that lie one behind another, as "name:bytes".
func (d *dumper) fields(off int, title string, specs ...string) {
	for _, spec := range specs {
		name, size, _ := strings.Cut(spec, ":")
		var n int
		fmt.Sscan(size, &n)
		var v [8]byte
		if unused := name == "zero" || name == "reserved" || name == "padding"; unused {
			off += n
			continue
		}
		if n > 8 {
			d.note(off, n, "%s %s", title, name)
		} else {
			copy(v[:], d.b[off:off+n])
			d.note(off, n, "%s %s %d", title, name, le.Uint64(v[:]))
		}
		off += n
	}
}

func (d *dumper) String() string {
	var out strings.Builder
	for off := 0; off < len(d.b); {
		n, known := d.notes[off]
		if !known {
			n = note{1, "?"}
			for off+n.size < len(d.b) && d.notes[off+n.size].size == 0 {
				n.size++
			}
			if len(bytes.Trim(d.b[off:off+n.size], "\x00")) == 0 {
				fmt.Fprintf(&out, "%06x  %d zero bytes\n", off, n.size)
				off += n.size
				continue
			}
		}
		for at := 0; at < n.size; at += 16 {
			text := n.text
			if at > 0 {
				text = ""
			}
			line := fmt.Sprintf("%06x  %-32x  %s", off+at, d.b[off+at:off+min(at+16, n.size)], text)
			out.WriteString(strings.TrimRight(line, " ") + "\n")
		}
		off += n.size
	}
	return out.String()
}

func dumpBootstrap(b []byte) string {
	d := &dumper{b: b, notes: map[int]note{}}
	d.fields(1024, "superblock", "magic:4", "checksum:4", "feature_compat:4", "blkszbits:1", "extslots:1", "root_nid:2", "inos:8",
		"build_time:8", "build_time_nsec:4", "blocks:4", "meta_blkaddr:4", "xattr_blkaddr:4", "uuid:16", "volume_name:16",
		"feature_incompat:4", "union:2", "extra_devices:2", "devt_slotoff:2", "reserved:38")
	d.fields(1152, "extended superblock", "flags:8", "blob_table_offset:8", "blob_table_size:4", "chunk_size:4", "chunk_table_offset:8",
		"chunk_table_size:8", "prefetch_offset:8", "prefetch_size:4", "padding:4", "reserved:200")
	d.fields(1408, "device slot", "tag:64", "blocks:4", "mapped_blkaddr:4", "reserved:56")
	d.fields(4096, "blob record", "blob_id:64", "blob_index:4", "chunk_size:4", "chunk_count:4", "compressor:4", "digester:4", "features:4",
		"compressed_size:8", "uncompressed_size:8", "blob_toc_size:4", "ci_compressor:4", "ci_offset:8", "ci_compressed_size:8",
		"ci_uncompressed_size:8", "blob_toc_digest:32", "blob_meta_digest:32", "blob_meta_size:8", "cipher_iv:8", "cipher_algo:4", "zero:36")
	d.inode("/", int(le.Uint16(b[1038:])))
	table, size := int(le.Uint64(b[1176:])), int(le.Uint64(b[1184:]))
	for off := table; off < table+size; off += 80 {
		d.fields(off, fmt.Sprintf("chunk %d", (off-table)/80), "digest:32", "blob_index:4", "flags:4", "compressed_size:4",
			"uncompressed_size:4", "compressed_offset:8", "uncompressed_offset:8", "file_offset:8", "index:4", "crc32:4")
	}
	return d.String()
}

// inode annotates an inode, what belongs to it, and what lies below it.
func (d *dumper) inode(path string, nid int) {
	off := 4096 + 32*nid
	h := d.b[off:]
	d.fields(off, path, "format:2", "xattr_icount:2", "mode:2", "zero:2", "size:8", "i_u:4", "ino:4", "uid:4", "gid:4",
		"mtime:8", "mtime_nsec:4", "nlink:4", "reserved:16")
	d.note(off+4, 2, "%s mode %#o", path, le.Uint16(h[4:]))
	at := off + 64
	if count := int(le.Uint16(h[2:])); count > 0 {
		d.note(at, 12+4*(count-1), "%s xattrs", path)
		at += 12 + 4*(count-1)
	}
	size := int(le.Uint64(h[8:]))
	switch {
	case le.Uint16(h)>>1 == 4:
		at = (at + 7) &^ 7
		blockBits := int(le.Uint32(h[16:]) & 31)
		for k := 0; k<<(12+blockBits) < size; k++ {
			d.fields(at+8*k, fmt.Sprintf("%s chunk index %d", path, k), "number low:2", "device, number high:2", "block:4")
		}
	case le.Uint16(h[4:])&rafs.ModeType == rafs.ModeSymlink:
		d.note(at, size, "%s target", path)
	case le.Uint16(h[4:])&rafs.ModeType == rafs.ModeDir:
		d.dir(path, at, size)
	}
}

// dir annotates a directory with one inline block.
func (d *dumper) dir(path string, at, size int) {
	first := int(le.Uint16(d.b[at+8:]))
	for e := at; e < at+first; e += 12 {
		end := at + size
		if e+12 < at+first {
			end = at + int(le.Uint16(d.b[e+12+8:]))
		}
		start := at + int(le.Uint16(d.b[e+8:]))
		name := string(d.b[start:end])
		d.fields(e, fmt.Sprintf("%s entry %q", path, name), "nid:8", "nameoff:2", "type:1", "zero:1")
		d.note(start, end-start, "%s name %q", path, name)
		if name != "." && name != ".." {
			d.inode(strings.TrimSuffix(path, "/")+"/"+name, int(le.Uint64(d.b[e:])))
		}
	}
}

func dumpTail(blob *rafs.Blob) string {
	d := &dumper{b: blob.Tail(), notes: map[int]note{}}
	at := 0
	for i := range blob.Chunks {
		a, b := le.Uint64(d.b[at:]), le.Uint64(d.b[at+8:])
		d.note(at, 8, "chunk-meta %d: block %d, length %d", i, uint32(a), 1+a>>32)
		d.note(at+8, 8, "chunk-meta %d: offset %d, stored length %d", i, b&(1<<40-1), b>>40)
		d.note(at+16, 8, "chunk-meta %d: no CRC", i)
		at += 24
	}
	d.fields(at, "header", "magic:4", "features:4", "ci_compressor:4", "entries:4", "ci_offset:8", "ci_compressed_size:8", "ci_uncompressed_size:8")
	d.fields(at+4092, "header", "magic:4")
	at += 4096
	for i := range blob.Chunks {
		d.note(at, 32, "blob.digest %d", i)
		at += 32
	}
	d.fields(at, "toc", "flags:4", "zero:4", "name:16", "digest:32", "compressed_offset:8", "compressed_size:8", "uncompressed_size:8", "zero:48")
	at += 128
	d.note(at, 512, "tar header")
	return d.String()
}

// TestChunkNumbersAbove16Bits pins the byte that no small tree needs: the high part
// of a chunk number, next to the device number.
func TestChunkNumbersAbove16Bits(t *testing.T) {
	s := newSample(4096)
	n := &rafs.Inode{Mode: rafs.ModeRegular, Size: 4096 * 70000}
	for i := range 70000 {
		var d [32]byte
		le.PutUint32(d[:], uint32(bits.Reverse32(uint32(i))))
		n.Chunks = append(n.Chunks, d)
	}
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{"f": n})
	boot, m := s.encode(t)
	last := m.Blob.Chunks[69999]
	if last.Digest != n.Chunks[69999] || last.DevOff != 69999*4096 || last.Off != last.DevOff {
		t.Errorf("got %+v as the last chunk", last)
	}
	// The file is the only inode behind the root, whose 64 + 27 + 13 bytes end at 8320.
	index := boot[8320+64+8*69999:]
	if got, want := fmt.Sprintf("%x", index[:8]), "6f11"+"0101"+"6f110100"; got != want {
		t.Errorf("got index %s, want %s", got, want)
	}
}
