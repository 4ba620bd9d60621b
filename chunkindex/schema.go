package chunkindex

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"

	"github.com/cockroachdb/pebble/v2"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// Keys and values of the database, integers big-endian so that they sort:
//
//	"v"                      → "2", the version of this schema
//	'c' digest[32]           → number[4] off[4] stored[4] len[4] crc[4] codec[1]
//	'p' number[4]            → pack digest[32], written with the pack's chunks
//	'q' number[4]            → digest[32] of each of the pack's chunks that is
//	                           not at a later pack
//	"t"                      → number[4]: none of the chunks of packs from that
//	                           number on was removed; nothing: of all packs
//
// A pack has a small number here because its digest in every value would more
// than double the index.
const (
	versionKey     = "v"
	currentVersion = "2"
	firstVersion   = "1" // without 'q' and "t", and made the second when opened
	wholeKey       = "t"
	chunkPrefix    = 'c'
	packPrefix     = 'p'
	digestsPrefix  = 'q'
	valueSize      = 21
)

var be = binary.BigEndian

func chunkKey(d chunk.Digest) []byte {
	return append([]byte{chunkPrefix}, d[:]...)
}

func decodeChunkKey(k []byte) (chunk.Digest, error) {
	if len(k) != 1+len(chunk.Digest{}) {
		return chunk.Digest{}, fmt.Errorf("chunk index key %x has %d bytes", k, len(k))
	}
	return chunk.Digest(k[1:]), nil
}

func packKey(n uint32) []byte {
	return be.AppendUint32([]byte{packPrefix}, n)
}

func digestsKey(n uint32) []byte {
	return be.AppendUint32([]byte{digestsPrefix}, n)
}

// encode needs 32 bits for the offset, which pack.MaxPack bounds.
func encode(packNumber uint32, e pack.Entry) []byte {
	b := make([]byte, 0, valueSize)
	b = be.AppendUint32(b, packNumber)
	b = be.AppendUint32(b, uint32(e.Off))
	b = be.AppendUint32(b, e.Stored)
	b = be.AppendUint32(b, e.Len)
	b = be.AppendUint32(b, e.CRC)
	return append(b, byte(e.Codec))
}

// packTable is the pack numbers of an index, kept in memory: 50 000 packs are
// 3 TB of chunks and take a few megabytes.
type packTable struct {
	numbers map[chunk.Digest]uint32
	digests map[uint32]chunk.Digest
	next    uint32 // larger than every number in use
}

func newPackTable() packTable {
	return packTable{numbers: map[chunk.Digest]uint32{}, digests: map[uint32]chunk.Digest{}}
}

func loadPackTable(db *pebble.DB) (packTable, error) {
	t := newPackTable()
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{packPrefix}, UpperBound: []byte{packPrefix + 1}})
	if err != nil {
		return t, err
	}
	for it.First(); it.Valid(); it.Next() {
		k, v := it.Key(), it.Value()
		if len(k) != 5 || len(v) != len(chunk.Digest{}) {
			return t, errors.Join(fmt.Errorf("pack table line %x has %d bytes", k, len(v)), it.Close())
		}
		t.set(be.Uint32(k[1:]), chunk.Digest(v))
	}
	return t, errors.Join(it.Error(), it.Close())
}

func (t *packTable) set(n uint32, id chunk.Digest) {
	t.numbers[id], t.digests[n] = n, id
	t.next = max(t.next, n+1)
}

// add gives a pack the next number unless it has one.
func (t *packTable) add(id chunk.Digest) {
	if _, known := t.numbers[id]; !known {
		t.set(t.next, id)
	}
}

func (t *packTable) remove(id chunk.Digest) {
	delete(t.digests, t.numbers[id])
	delete(t.numbers, id)
}

func (t *packTable) clone() packTable {
	return packTable{maps.Clone(t.numbers), maps.Clone(t.digests), t.next}
}

// decode reads a value strictly: the lengths it returns are safe to allocate.
func (t *packTable) decode(v []byte) (Location, error) {
	if len(v) != valueSize {
		return Location{}, fmt.Errorf("chunk index value has %d bytes, want %d", len(v), valueSize)
	}
	id, ok := t.digests[be.Uint32(v)]
	if !ok {
		return Location{}, fmt.Errorf("chunk index names unknown pack number %d: run quarry index rebuild", be.Uint32(v))
	}
	e := pack.Entry{
		Off: int64(be.Uint32(v[4:])), Stored: be.Uint32(v[8:]), Len: be.Uint32(v[12:]),
		CRC: be.Uint32(v[16:]), Codec: pack.Codec(v[20]),
	}
	if err := e.Validate(); err != nil {
		return Location{}, fmt.Errorf("chunk index value: %w", err)
	}
	return At(id, e), nil
}
