package pack

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"

	"quarry/store/chunk"
)

// encoderWindow covers a default chunk whole. A larger one costs memory per
// encoder (twice the window) and cache misses, and gains nothing on chunks of
// 256 KiB.
const encoderWindow = 512 << 10

// The coders keep only scratch memory between calls, one set per processor, so
// sharing them is sharing a pool. EncodeAll and DecodeAll are safe for
// concurrent use and wait for a free set.
var (
	encoder = sync.OnceValue(func() *zstd.Encoder {
		return must(zstd.NewWriter(nil,
			zstd.WithEncoderLevel(zstd.SpeedFastest),
			zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)),
			zstd.WithWindowSize(encoderWindow),
			zstd.WithSingleSegment(true), // makes every frame declare its content size
			zstd.WithEncoderCRC(false)))  // the record has a CRC32C, the chunk a digest
	})
	decoder = sync.OnceValue(func() *zstd.Decoder {
		return must(zstd.NewReader(nil,
			zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)),
			zstd.WithDecoderMaxMemory(chunk.MaxSize),
			zstd.WithDecodeAllCapLimit(true)))
	})
)

// must is for constructors that fail only on options out of range.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Compress returns the stored form of the plain bytes p of a chunk: one zstd
// frame in the memory of dst[:0], grown when needed, or p itself as Raw when
// the frame is not smaller.
func Compress(dst, p []byte) (Codec, []byte) {
	frame := encoder().EncodeAll(p, dst[:0])
	if len(frame) >= len(p) {
		return Raw, p
	}
	return Zstd, frame
}

// Decode returns the plain bytes of a stored chunk in the memory of dst[:0],
// grown when needed. Nothing is allocated before the lengths were checked and
// the frame was found to declare exactly plainLen, so a lying store costs at
// most chunk.MaxSize bytes. The caller compares the digest.
func Decode(dst []byte, c Codec, stored []byte, plainLen uint32) ([]byte, error) {
	if err := validateLengths(c, int64(len(stored)), plainLen); err != nil {
		return nil, err
	}
	if c == Raw {
		return append(dst[:0], stored...), nil
	}
	if err := validateFrame(stored, plainLen); err != nil {
		return nil, err
	}
	plain, err := decoder().DecodeAll(stored, slices.Grow(dst[:0], int(plainLen)))
	if err != nil {
		return nil, fmt.Errorf("decode zstd frame: %w", err)
	}
	if len(plain) != int(plainLen) {
		return nil, fmt.Errorf("zstd frame has %d bytes, want %d", len(plain), plainLen)
	}
	return plain, nil
}

// validateFrame accepts exactly one zstd frame that declares plainLen, without
// dictionary, and no byte after it.
func validateFrame(b []byte, plainLen uint32) error {
	var h zstd.Header
	if err := h.Decode(b); err != nil {
		return fmt.Errorf("decode zstd frame header: %w", err)
	}
	switch {
	case h.Skippable:
		return errors.New("zstd frame is a skippable one")
	case !h.HasFCS || h.FrameContentSize != uint64(plainLen):
		return fmt.Errorf("zstd frame declares %d bytes (declared: %t), want %d", h.FrameContentSize, h.HasFCS, plainLen)
	case h.DictionaryID != 0:
		return fmt.Errorf("zstd frame needs dictionary %d", h.DictionaryID)
	case !h.SingleSegment && h.WindowSize > chunk.MaxSize:
		return fmt.Errorf("zstd frame needs a window of %d bytes, at most %d", h.WindowSize, chunk.MaxSize)
	}
	end, err := blocksEnd(b, h.HeaderSize)
	if err != nil {
		return err
	}
	if h.HasCheckSum {
		end += 4
	}
	if end != len(b) {
		return fmt.Errorf("zstd frame ends at byte %d of %d", end, len(b))
	}
	return nil
}

// blocksEnd returns where the blocks of a frame end, from the block headers
// alone: 3 bytes, bit 0 last, bits 1-2 type, the rest size (RFC 8878, 3.1.1.2).
func blocksEnd(b []byte, off int) (int, error) {
	const rle = 1
	for off+3 <= len(b) {
		head := uint(b[off]) | uint(b[off+1])<<8 | uint(b[off+2])<<16
		size := int(head >> 3)
		if head>>1&3 == rle {
			size = 1
		}
		off += 3 + size
		if head&1 == 1 {
			return off, nil
		}
	}
	return 0, errors.New("zstd frame is cut off")
}
