package blockdev

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"sync"

	"quarry/store/chunk"
)

const (
	// tagSize is what is kept of each block: with 128 bits a disk that makes up
	// blocks gets one past us with a chance of 2^-120, see docs/decisions/block-hash.md.
	tagSize = 16
	// maxTagBytes bounds the tags: 4 MiB a GiB of chunks, so the chunks used last
	// of a cache disk of up to 16 GiB. Of what is beyond, a read takes the whole chunk.
	maxTagBytes = 64 << 20
	// tagsOverhead is what an entry takes beside its tags: 32 bytes of digest, 32 of
	// record, doubled for the map's free slots.
	tagsOverhead = 128
)

// blockTags keeps a keyed hash of every block of chunks that were verified, so
// that some of a chunk's blocks can be read again from a disk that may lie. The
// hash is GMAC, AES-GCM without plaintext, under a random key that never leaves
// the process, and a nonce that no other tag has. Safe for concurrent use.
type blockTags struct {
	aead cipher.AEAD

	mu sync.Mutex // guards what follows
	// The young half gets what is added or used; when it is full it becomes the
	// old half, and the old one goes. So what goes was not used for a long time.
	young, old map[chunk.Digest]*tagged
	bytes      int64 // of young
	serial     uint64
}

// tagged are the tags of one chunk. They are never changed.
type tagged struct {
	serial uint64 // half of the nonce
	tags   []byte
}

func newBlockTags() *blockTags {
	var key [16]byte
	rand.Read(key[:]) // never fails
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic(err) // for keys of another length
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err) // for other ciphers than AES
	}
	return &blockTags{aead: aead, young: map[chunk.Digest]*tagged{}}
}

// scratch is what making a tag needs; one for many saves their allocations.
type scratch struct {
	nonce [12]byte
	tag   [tagSize]byte
}

// tag makes the tag of block number k of the chunk with that serial, in s.
func (t *blockTags) tag(s *scratch, serial uint64, k int64, p []byte) []byte {
	binary.LittleEndian.PutUint64(s.nonce[:], serial)
	binary.LittleEndian.PutUint32(s.nonce[8:], uint32(k))
	return t.aead.Seal(s.tag[:0], s.nonce[:], nil, p)
}

// add keeps the tags of a chunk whose bytes p were verified.
func (t *blockTags) add(d chunk.Digest, p []byte) {
	t.mu.Lock()
	t.serial++
	e := &tagged{serial: t.serial}
	t.mu.Unlock()
	e.tags = make([]byte, 0, blocksOf(int64(len(p)))*tagSize)
	var s scratch
	for k := int64(0); len(p) > 0; k++ {
		n := min(blockSize, len(p))
		e.tags = append(e.tags, t.tag(&s, e.serial, k, p[:n])...)
		p = p[n:]
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keep(d, e)
}

// keep puts a chunk's tags in the young half. Called with mu held.
func (t *blockTags) keep(d chunk.Digest, e *tagged) {
	if was := t.young[d]; was != nil {
		t.bytes -= int64(len(was.tags)) + tagsOverhead
	}
	t.young[d] = e
	t.bytes += int64(len(e.tags)) + tagsOverhead
	if t.bytes > maxTagBytes/2 {
		t.old, t.young, t.bytes = t.young, map[chunk.Digest]*tagged{}, 0
	}
}

// get returns the tags of a chunk, or nil.
func (t *blockTags) get(d chunk.Digest) *tagged {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.young[d]; e != nil {
		return e
	}
	e := t.old[d]
	if e != nil {
		delete(t.old, d)
		t.keep(d, e)
	}
	return e
}

// drop forgets the tags of a chunk.
func (t *blockTags) drop(d chunk.Digest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.young[d]; e != nil {
		t.bytes -= int64(len(e.tags)) + tagsOverhead
	}
	delete(t.young, d)
	delete(t.old, d)
}

// check reports whether p, which begins with block number k and ends with a
// block's or the chunk's end, are the bytes that were tagged.
func (t *blockTags) check(e *tagged, k int64, p []byte) bool {
	var s scratch
	for ; len(p) > 0; k++ {
		n := min(blockSize, len(p))
		at := int(k) * tagSize
		if at+tagSize > len(e.tags) {
			return false
		}
		got := t.tag(&s, e.serial, k, p[:n])
		if subtle.ConstantTimeCompare(got, e.tags[at:at+tagSize]) != 1 {
			return false
		}
		p = p[n:]
	}
	return true
}

// blocksOf returns how many blocks n bytes take.
func blocksOf(n int64) int64 { return (n + blockSize - 1) / blockSize }
