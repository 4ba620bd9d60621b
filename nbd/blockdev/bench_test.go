package blockdev_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/store/chunk"
)

// wholeDisk is a disk with every chunk, in memory, so that what is measured is
// the reader.
type wholeDisk map[chunk.Digest][]byte

func (k wholeDisk) ReadAt(d chunk.Digest, p []byte, off int64) error {
	copy(p, k[d][off:])
	return nil
}
func (k wholeDisk) Has(d chunk.Digest) bool    { return k[d] != nil }
func (k wholeDisk) Offer(chunk.Digest, []byte) {}
func (k wholeDisk) Drop(chunk.Digest)          { panic("a good copy is dropped") }

// bigImage has 16 MiB in chunks of 256 KiB.
func bigImage(b *testing.B) *image {
	m := &image{store: &memory{chunks: map[chunk.Digest][]byte{}}}
	rnd := rand.NewChaCha8([32]byte{9})
	f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644}
	for range 64 {
		p := make([]byte, chunk.DefaultSize)
		rnd.Read(p)
		m.store.chunks[chunk.Sum(p)] = p
		f.Chunks, f.Size = append(f.Chunks, chunk.Sum(p)), f.Size+int64(len(p))
	}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{{Name: "f", Inode: f}}}
	m.encodeSized(b, root, chunk.DefaultSize)
	return m
}

// BenchmarkRead reads what was read before: from memory, from the disk with and
// without what is known of its blocks, and, to compare, copies the same bytes.
func BenchmarkRead(b *testing.B) {
	m := bigImage(b)
	onDisk := wholeDisk(m.store.chunks)
	for _, c := range []struct {
		name      string
		configure func(*blockdev.Config)
	}{
		{"memory", func(c *blockdev.Config) { c.Memory = blockdev.NewMemory(256 << 20) }},
		{"disk", func(c *blockdev.Config) { c.Memory, c.Disk = blockdev.NewMemory(-1), onDisk }},
	} {
		d := m.device(b, c.configure)
		for _, size := range []int64{4 << 10, 128 << 10} {
			b.Run(c.name+" random "+kib(size), func(b *testing.B) {
				rnd := rand.New(rand.NewPCG(1, 2))
				benchRead(b, m, d, size, func() int64 { return rnd.Int64N(16<<20/size) * size })
			})
		}
		b.Run(c.name+" sequential 128K", func(b *testing.B) {
			var off int64
			benchRead(b, m, d, 128<<10, func() int64 { off = (off + 128<<10) % (16 << 20); return off })
		})
	}
	b.Run("disk, whole chunk verified, 4K", func(b *testing.B) {
		p := make([]byte, 4096)
		b.SetBytes(4096)
		for b.Loop() {
			b.StopTimer()
			d := m.device(b, func(c *blockdev.Config) { c.Memory, c.Disk = blockdev.NewMemory(-1), onDisk })
			b.StartTimer()
			if err := d.ReadAt(b.Context(), p, m.img.Blob.MappedOff); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("copy 4K", func(b *testing.B) {
		p := make([]byte, 4096)
		b.SetBytes(4096)
		for b.Loop() {
			copy(p, m.flat[rand.Int64N(16<<20/4096)*4096:])
		}
	})
}

func kib(n int64) string {
	if n == 4<<10 {
		return "4K"
	}
	return "128K"
}

func benchRead(b *testing.B, m *image, d *blockdev.Device, size int64, next func() int64) {
	p := make([]byte, size)
	at := m.img.Blob.MappedOff
	for off := int64(0); off < 16<<20; off += chunk.DefaultSize { // the first read of each verifies it
		if err := d.ReadAt(b.Context(), p, at+off); err != nil || !bytes.Equal(p, m.flat[at+off:][:size]) {
			b.Fatalf("read at %d: %v, or other bytes", off, err)
		}
	}
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		if err := d.ReadAt(b.Context(), p, at+next()); err != nil {
			b.Fatal(err)
		}
	}
}
