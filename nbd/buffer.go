package nbd

import "sync"

// headRoom is for what stands before a payload: the head of a structured reply.
const headRoom = structuredSize + 8

// The sizes buffers are kept in: a few blocks, what one read of a mounted image
// can ask for, and the large reads of copying tools, each with its head. Longer
// ones are rare and left to the garbage collector.
var bufferSizes = [...]int{16<<10 + headRoom, 256<<10 + headRoom, 2<<20 + headRoom}

// bufferPool keeps payload buffers between requests. The zero value is ready.
type bufferPool struct {
	bySize [len(bufferSizes)]sync.Pool
}

// get returns a buffer of n bytes with undefined content.
func (bp *bufferPool) get(n int) *[]byte {
	for i, size := range bufferSizes {
		if n > size {
			continue
		}
		if b, ok := bp.bySize[i].Get().(*[]byte); ok {
			*b = (*b)[:n]
			return b
		}
		b := make([]byte, n, size)
		return &b
	}
	b := make([]byte, n)
	return &b
}

// put gives back a buffer that nothing reads any more.
func (bp *bufferPool) put(b *[]byte) {
	for i, size := range bufferSizes {
		if cap(*b) == size {
			bp.bySize[i].Put(b)
			return // b may be in use again
		}
	}
}
