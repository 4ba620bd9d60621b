package pack_test

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"quarry/store/chunk"
	"quarry/store/pack"
)

func noise(n int) []byte {
	p := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(p)
	return p
}

func TestCompressAndDecode(t *testing.T) {
	for _, tc := range []struct {
		name string
		p    []byte
		want pack.Codec
	}{
		{"one byte", []byte{1}, pack.Raw},
		{"short text", []byte("hello"), pack.Raw},
		{"100 zeros", make([]byte, 100), pack.Zstd},
		{"300 zeros", make([]byte, 300), pack.Zstd},
		{"noise of a chunk", noise(chunk.DefaultSize), pack.Raw},
		{"text of a chunk", bytes.Repeat([]byte("text of a chunk "), chunk.DefaultSize/16), pack.Zstd},
		{"zeros of the largest chunk", make([]byte, chunk.MaxSize), pack.Zstd},
		{"noise of the largest chunk", noise(chunk.MaxSize), pack.Raw},
	} {
		for _, dst := range [][]byte{nil, make([]byte, 10), make([]byte, 0, 1<<20)} {
			c, stored := pack.Compress(dst, tc.p)
			if c != tc.want || c == pack.Zstd && len(stored) >= len(tc.p) {
				t.Errorf("%s: %s of %d bytes", tc.name, c, len(stored))
			}
			got, err := pack.Decode(nil, c, stored, uint32(len(tc.p)))
			if err != nil || !bytes.Equal(got, tc.p) {
				t.Errorf("%s: decoded %d bytes, error %v", tc.name, len(got), err)
			}
		}
	}
}

func TestDecodeReusesDst(t *testing.T) {
	p := bytes.Repeat([]byte("words "), 10_000)
	c, stored := pack.Compress(nil, p)
	dst := make([]byte, 3, 100_000)
	got, err := pack.Decode(dst, c, stored, uint32(len(p)))
	if err != nil || !bytes.Equal(got, p) {
		t.Fatalf("%d bytes, error %v", len(got), err)
	}
	if &got[0] != &dst[0] {
		t.Error("dst was not used")
	}
}

// frame makes a zstd frame with the options of another writer.
func frame(t testing.TB, p []byte, opts ...zstd.EOption) []byte {
	t.Helper()
	e, err := zstd.NewWriter(nil, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return e.EncodeAll(p, nil)
}

// streamed makes a frame that does not declare its content size.
func streamed(t testing.TB, p []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	e, err := zstd.NewWriter(&buf)
	if err != nil {
		t.Fatal(err)
	}
	for i := range p {
		if _, err := e.Write(p[i : i+1]); err != nil {
			t.Fatal(err)
		}
		if i%1000 == 0 {
			if err := e.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestDecodeTakesFramesOfOtherWriters(t *testing.T) {
	p := bytes.Repeat([]byte("other writers "), 20_000)
	for name, b := range map[string][]byte{
		"best level":     frame(t, p, zstd.WithEncoderLevel(zstd.SpeedBestCompression)),
		"with checksum":  frame(t, p, zstd.WithEncoderCRC(true)),
		"window in head": frame(t, p, zstd.WithSingleSegment(false), zstd.WithWindowSize(64<<10)),
	} {
		if got, err := pack.Decode(nil, pack.Zstd, b, uint32(len(p))); err != nil || !bytes.Equal(got, p) {
			t.Errorf("%s: %d bytes, error %v", name, len(got), err)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	p := bytes.Repeat([]byte("refused "), 2_000)
	n := uint32(len(p))
	good := frame(t, p)
	empty := frame(t, nil, zstd.WithZeroFrames(true))
	dict := frame(t, p, zstd.WithEncoderDictRaw(77, noise(2000)))
	skippable := []byte{0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 1, 2}
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for _, tc := range []struct {
		name   string
		codec  pack.Codec
		stored []byte
		len    uint32
		want   string
	}{
		{"an unknown codec", 2, good, n, "unknown codec"},
		{"raw of another length", pack.Raw, p[1:], n, "stored as"},
		{"zstd not smaller than plain", pack.Zstd, p, n, "want fewer"},
		{"no stored bytes", pack.Zstd, nil, n, "want fewer"},
		{"plain length 0", pack.Zstd, good, 0, "plain length"},
		{"plain length over the limit", pack.Zstd, good, chunk.MaxSize + 1, "plain length"},
		{"no frame", pack.Zstd, noise(500), n, "frame header"},
		{"a shorter plain length", pack.Zstd, good, n - 1, "declares"},
		{"a longer plain length", pack.Zstd, good, n + 1, "declares"},
		{"no declared length", pack.Zstd, streamed(t, p), n, "declared: false"},
		{"a dictionary", pack.Zstd, dict, n, "dictionary"},
		{"a byte after the frame", pack.Zstd, join(good, []byte{0}), n, "ends at"},
		{"an empty frame after the frame", pack.Zstd, join(good, empty), n, "ends at"},
		{"a skippable frame after the frame", pack.Zstd, join(good, skippable), n, "ends at"},
		{"a skippable frame before the frame", pack.Zstd, join(skippable, good), n, "skippable"},
		{"a second frame", pack.Zstd, join(good, good), n, "ends at"},
		{"a frame that is cut off", pack.Zstd, good[:len(good)-2], n, "ends at"},
		{"a frame cut off after its header", pack.Zstd, good[:7], n, "frame"},
		{"a large window", pack.Zstd, largeWindow(n), n, "window"},
		{"fewer bytes than declared", pack.Zstd, repeated(n, n-1), n, ""},
		{"more bytes than declared", pack.Zstd, repeated(n, n+1), n, ""},
		{"far more bytes than declared", pack.Zstd, repeated(n, 100<<10, 100<<10, 100<<10), n, ""},
	} {
		got, err := pack.Decode(nil, tc.codec, tc.stored, tc.len)
		if err == nil || got != nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %d bytes, error %v, want %q", tc.name, len(got), err, tc.want)
		}
	}
}

// repeated makes a frame that declares n bytes and has blocks that each repeat
// one byte that often: 4 bytes of input for up to 128 KiB of output.
func repeated(n uint32, blocks ...uint32) []byte {
	b := []byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0, byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)}
	for i, size := range blocks {
		head := size<<3 | 1<<1
		if i == len(blocks)-1 {
			head |= 1
		}
		b = append(b, byte(head), byte(head>>8), byte(head>>16), 'x')
	}
	return b
}

// largeWindow makes a frame header that asks for a window of 1 GiB.
func largeWindow(n uint32) []byte {
	return []byte{0x28, 0xb5, 0x2f, 0xfd, 0x80, 20 << 3, byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24), 1, 0, 0}
}

// A lying store must not make a reader allocate: the bomb is refused before
// memory is taken for it, and what the blocks hold beyond the declared length is
// not decompressed.
func TestDecompressionBombsAllocateNothing(t *testing.T) {
	blocks := make([]uint32, 8192) // 32 KiB that would become 1 GiB
	for i := range blocks {
		blocks[i] = 128 << 10
	}
	for _, tc := range []struct {
		name  string
		frame []byte
		len   uint32
		limit uint64
	}{
		{"declares 1 GiB", repeated(1<<30, blocks...), 256 << 10, 64 << 10},
		{"declares the limit and one", repeated(chunk.MaxSize+1, blocks...), chunk.MaxSize, 64 << 10},
		{"declares 256 KiB and has 1 GiB", repeated(256<<10, blocks...), 256 << 10, 1 << 20},
		{"wants a window of 1 GiB", append(largeWindow(256<<10), make([]byte, 100)...), 256 << 10, 64 << 10},
	} {
		_, _ = pack.Decode(nil, pack.Zstd, repeated(1000, 1000), 1000) // the decoder itself
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := pack.Decode(nil, pack.Zstd, tc.frame, tc.len)
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s: was decoded", tc.name)
		}
		if got := after.TotalAlloc - before.TotalAlloc; got > tc.limit {
			t.Errorf("%s: %d bytes were allocated, at most %d are allowed", tc.name, got, tc.limit)
		}
	}
}
