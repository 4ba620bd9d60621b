package image

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"quarry/store/chunk"
)

const (
	layerMagic = "quarryLR"
	// layerVersion changes with the format, and with every change of what
	// converter/layer makes of a layer: a record made otherwise would give an image
	// that depends on when its layers were read.
	layerVersion = 2
	layerHeader  = 8 + 4 + 4 + 32 + 32 + 8 + 8
	layerMAC     = sha256.Size
	// MACKeySize is the least length of a MAC key in bytes, HMAC-SHA256's own.
	MACKeySize = 32
	// MaxLayerRecord bounds a record in bytes: 8 Mi digests of 32 bytes, which at
	// S = 256 KiB are the chunks of 2 TiB.
	MaxLayerRecord = 256 << 20
	// MaxEntries bounds the entries of a layer; the largest known have 10^5.
	MaxEntries = 1 << 21
	// MaxText bounds a name, link, xattr name or xattr value of an entry. What a
	// tree takes is less; this only keeps a length from filling memory.
	MaxText = 1 << 20
)

// ErrBadMAC says that a layer record was not made with this MAC key, or was
// altered. Such a record says nothing: the layer counts as unknown.
var ErrBadMAC = errors.New("layer record is not authentic: another data folder's key made it, or it was altered; convert the layer again")

// LayerRecord is what a store remembers of a layer it has decompressed itself,
// so that the next image with that layer need not be read again.
type LayerRecord struct {
	ChunkSize uint32       // S, in bytes
	Layer     chunk.Digest // of the compressed bytes
	DiffID    chunk.Digest // of the uncompressed tar, computed and not claimed
	Size      int64        // compressed, in bytes
	PlainSize int64        // uncompressed, in bytes
	Entries   []Entry      // in tar order
}

// EncodeLayer returns the record's bytes, authenticated with macKey of at least
// MACKeySize bytes. It fails with ErrMalformed on what DecodeLayer would refuse.
func EncodeLayer(rec *LayerRecord, macKey []byte) ([]byte, error) {
	if len(macKey) < MACKeySize {
		return nil, shortKey(macKey)
	}
	b, err := encodeLayerBody(rec)
	if err != nil {
		return nil, fmt.Errorf("record of layer %s: %w", rec.Layer, err)
	}
	return append(b, mac(b, macKey)...), nil
}

// DecodeLayer verifies a record and reads it. It takes exactly what EncodeLayer
// writes. The caller compares Layer and ChunkSize with what it asked for: an
// untrusted bucket can answer with the authentic record of another layer.
// Errors: ErrVersion, ErrBadMAC, ErrMalformed.
func DecodeLayer(b []byte, macKey []byte) (*LayerRecord, error) {
	if len(macKey) < MACKeySize {
		return nil, shortKey(macKey)
	}
	rec, err := decodeLayer(b, macKey)
	if err != nil {
		return nil, fmt.Errorf("layer record: %w", err)
	}
	return rec, nil
}

func decodeLayer(b, macKey []byte) (*LayerRecord, error) {
	if len(b) < layerHeader+1+layerMAC || len(b) > MaxLayerRecord {
		return nil, fmt.Errorf("%w: %d bytes, want %d to %d", ErrMalformed, len(b), layerHeader+1+layerMAC, MaxLayerRecord)
	}
	if string(b[:8]) != layerMagic {
		return nil, fmt.Errorf("%w: it does not start with %q", ErrMalformed, layerMagic)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != layerVersion {
		return nil, fmt.Errorf("%w: version %d, this program knows %d", ErrVersion, v, layerVersion)
	}
	body, sum := b[:len(b)-layerMAC], b[len(b)-layerMAC:]
	if !hmac.Equal(sum, mac(body, macKey)) {
		return nil, ErrBadMAC
	}
	rec, err := decodeLayerBody(body)
	if err != nil {
		return nil, err
	}
	again, err := encodeLayerBody(rec)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, body) {
		return nil, fmt.Errorf("%w: not in the one form quarry writes", ErrMalformed)
	}
	return rec, nil
}

func shortKey(macKey []byte) error {
	return fmt.Errorf("MAC key has %d bytes, want at least %d", len(macKey), MACKeySize)
}

func mac(b, key []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(b)
	return h.Sum(nil)
}

func encodeLayerBody(rec *LayerRecord) ([]byte, error) {
	if err := rec.validate(); err != nil {
		return nil, err
	}
	b := make([]byte, 0, layerHeader+rec.bodyEstimate()+layerMAC)
	b = append(b, layerMagic...)
	b = binary.LittleEndian.AppendUint32(b, layerVersion)
	b = binary.LittleEndian.AppendUint32(b, rec.ChunkSize)
	b = append(b, rec.Layer[:]...)
	b = append(b, rec.DiffID[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(rec.Size))
	b = binary.LittleEndian.AppendUint64(b, uint64(rec.PlainSize))
	b = binary.AppendUvarint(b, uint64(len(rec.Entries)))
	previous := ""
	for i := range rec.Entries {
		e := &rec.Entries[i]
		if err := e.validate(rec.ChunkSize); err != nil {
			return nil, fmt.Errorf("entry %q: %w", e.Name, err)
		}
		b = e.append(b, previous)
		if len(b) > MaxLayerRecord-layerMAC {
			return nil, fmt.Errorf("%w: more than %d bytes: split the layer, or use a store with larger chunks", ErrMalformed, MaxLayerRecord)
		}
		previous = e.Name
	}
	return b, nil
}

// bodyEstimate is about what the entries take, so that few appends copy: 64
// bytes are the numbers and the part of a name that differs.
func (rec *LayerRecord) bodyEstimate() int {
	n := 0
	for i := range rec.Entries {
		n += 64 + len(rec.Entries[i].Link) + len(rec.Entries[i].Chunks)*sha256.Size
	}
	return min(n, MaxLayerRecord)
}

func (rec *LayerRecord) validate() error {
	if !chunk.ValidSize(int64(rec.ChunkSize)) {
		return fmt.Errorf("%w: chunk size %d is not a power of two from %d to %d", ErrMalformed, rec.ChunkSize, chunk.MinSize, chunk.MaxSize)
	}
	if rec.Layer.IsZero() || rec.DiffID.IsZero() {
		return fmt.Errorf("%w: a digest is zero", ErrMalformed)
	}
	if rec.Size < 0 || rec.PlainSize < 0 {
		return fmt.Errorf("%w: a size is negative", ErrMalformed)
	}
	if len(rec.Entries) > MaxEntries {
		return fmt.Errorf("%w: %d entries, at most %d", ErrMalformed, len(rec.Entries), MaxEntries)
	}
	return nil
}

func decodeLayerBody(b []byte) (*LayerRecord, error) {
	rec := &LayerRecord{
		ChunkSize: binary.LittleEndian.Uint32(b[12:]),
		Layer:     chunk.Digest(b[16:48]),
		DiffID:    chunk.Digest(b[48:80]),
		Size:      int64(binary.LittleEndian.Uint64(b[80:])),
		PlainSize: int64(binary.LittleEndian.Uint64(b[88:])),
	}
	// Before the entries, as their chunk counts follow from the chunk size.
	if err := rec.validate(); err != nil {
		return nil, err
	}
	r := &entryReader{b: b[layerHeader:], size: len(b), chunkSize: int64(rec.ChunkSize)}
	rec.Entries = make([]Entry, r.count(MaxEntries, minEntry))
	previous := ""
	for i := range rec.Entries {
		r.entry(&rec.Entries[i], previous)
		if r.err != nil {
			return nil, fmt.Errorf("entry %d of %d: %w", i, len(rec.Entries), r.err)
		}
		previous = rec.Entries[i].Name
	}
	if r.err == nil && len(r.b) != 0 {
		r.fail("%d bytes after the last entry", len(r.b))
	}
	if r.err != nil {
		return nil, r.err
	}
	return rec, nil
}
