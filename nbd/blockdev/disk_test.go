package blockdev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"quarry/nbd/blockdev"
	"quarry/store"
	"quarry/store/chunk"
)

// disk is a blockdev.Disk over a map, which tests damage. It writes at once.
type disk struct {
	mu      sync.Mutex // guards what follows
	copies  map[chunk.Digest][]byte
	reads   []int // lengths
	offered int
	dropped []chunk.Digest
	fail    error         // of reads
	hang    chan struct{} // reads wait for it
	block   chan struct{} // offers wait for it, though the contract says never
}

func newDisk() *disk { return &disk{copies: map[chunk.Digest][]byte{}} }

func (k *disk) ReadAt(d chunk.Digest, p []byte, off int64) error {
	if k.hang != nil {
		<-k.hang
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fail != nil {
		return k.fail
	}
	c, ok := k.copies[d]
	if !ok {
		return store.ErrNotFound
	}
	if off+int64(len(p)) > int64(len(c)) {
		return fmt.Errorf("%w: the copy ends before", store.ErrLocalDisk)
	}
	k.reads = append(k.reads, copy(p, c[off:]))
	return nil
}

func (k *disk) Offer(d chunk.Digest, p []byte) {
	if k.block != nil {
		<-k.block
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.offered++
	k.copies[d] = bytes.Clone(p)
}

func (k *disk) Has(d chunk.Digest) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.copies[d]
	return ok
}

func (k *disk) Drop(d chunk.Digest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dropped = append(k.dropped, d)
	delete(k.copies, d)
}

// noMemory makes every read go to the disk, with what is known of its blocks.
func noMemory(k *disk) func(*blockdev.Config) {
	return func(c *blockdev.Config) { c.Memory, c.Disk = blockdev.NewMemory(-1), k }
}

// fullChunk returns a chunk of full length, number n of those.
func (m *image) fullChunk(n int) int {
	for i, c := range m.img.Blob.Chunks {
		if c.Len == chunkSize {
			if n == 0 {
				return i
			}
			n--
		}
	}
	panic("the image has too few chunks of full length")
}

func TestDiskReadsTouchOnlyTheBlocksAsked(t *testing.T) {
	m := makeImage(t, 60)
	k := newDisk()
	i := m.fullChunk(0)
	d := m.device(t, noMemory(k))
	checkRead(t, d, m.flat, m.dataOff(i), 4096)
	d.Close() // the offer comes after the answer
	if k.offered != 1 || len(k.reads) != 0 {
		t.Fatalf("%d chunks offered, reads of %d, want 1 chunk and no read", k.offered, k.reads)
	}
	d = m.device(t, noMemory(k)) // as after a restart: nothing is known of the blocks
	checkRead(t, d, m.flat, m.dataOff(i)+4096, 4096)
	checkRead(t, d, m.flat, m.dataOff(i)+8192, 4096)
	checkRead(t, d, m.flat, m.dataOff(i)+5000, 7000)
	if got, want := fmt.Sprint(k.reads), fmt.Sprint([]int{chunkSize, 4096, 8192}); got != want {
		t.Errorf("reads of %s bytes, want %s: the first whole chunk is verified, then blocks", got, want)
	}
	if s := d.Stats(); s.Requests != 0 || s.Disk.Reads != 3 || s.Disk.Fetched.Chunks != 1 || s.DiskCorrupt != 0 {
		t.Errorf("got %+v, want 3 reads from the disk and 1 whole chunk", s)
	}
}

func TestWrongBytesOnTheDisk(t *testing.T) {
	m := makeImage(t, 60)
	i, other := m.fullChunk(0), m.fullChunk(1)
	digest := m.img.Blob.Chunks[i].Digest
	damages := map[string]func(k *disk){
		"a flipped bit":              func(k *disk) { k.copies[digest][4099] ^= 1 },
		"zeros":                      func(k *disk) { clear(k.copies[digest]) },
		"another chunk":              func(k *disk) { copy(k.copies[digest], m.store.chunks[m.img.Blob.Chunks[other].Digest]) },
		"its own blocks in disorder": func(k *disk) { copy(k.copies[digest][4096:8192], k.copies[digest][:4096]) },
		"the wanted block elsewhere": func(k *disk) { c := k.copies[digest]; copy(c, append(bytes.Clone(c[4096:8192]), c...)) },
		"half a copy":                func(k *disk) { k.copies[digest] = k.copies[digest][:5000] },
		"another chunk's second block": func(k *disk) {
			copy(k.copies[digest][4096:8192], m.store.chunks[m.img.Blob.Chunks[other].Digest][4096:])
		},
	}
	for name, damage := range damages {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restarted %v", name, restarted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { readDamaged(t, m, i, other, damage, restarted) })
			})
		}
	}
}

// readDamaged reads the second block of chunk i after the disk's copies of it and
// of another chunk were damaged.
func readDamaged(t *testing.T, m *image, i, other int, damage func(*disk), restarted bool) {
	digest := m.img.Blob.Chunks[i].Digest
	k := newDisk()
	var log bytes.Buffer
	configure := func(c *blockdev.Config) {
		noMemory(k)(c)
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
	}
	d := m.device(t, configure)
	checkRead(t, d, m.flat, m.dataOff(i), 1)
	checkRead(t, d, m.flat, m.dataOff(other), 1)
	synctest.Wait() // the offers come after the answers
	damage(k)
	if restarted {
		d = m.device(t, configure)
	}
	before := d.Stats().Requests
	checkRead(t, d, m.flat, m.dataOff(i)+4096, 4096)
	s := d.Stats()
	if s.Requests != before+1 || s.Errors != 0 || s.DiskCorrupt+s.DiskFailed == 0 {
		t.Errorf("got %+v, want the chunk fetched again, the disk's damage counted, and no error", s)
	}
	if s.DiskCorrupt > 0 && (len(k.dropped) != 1 || !strings.Contains(log.String(), "outcome=corrupt") || !strings.Contains(log.String(), digest.String())) {
		t.Errorf("dropped %v, log\n%s", k.dropped, log.String())
	}
	synctest.Wait()
	if !bytes.Equal(k.copies[digest], m.store.chunks[digest]) {
		t.Error("the disk was not given a good copy again")
	}
}

func TestADiskThatLiesAtRandomNeverGivesWrongBytes(t *testing.T) {
	m := makeImage(t, 60)
	k := newDisk()
	rnd := rand.New(rand.NewPCG(1, 2))
	d := m.device(t, noMemory(k))
	for n := range 3000 {
		k.mu.Lock()
		for digest, c := range k.copies { // one at random
			c = bytes.Clone(c)
			for range 1 + rnd.IntN(3) {
				c[rnd.IntN(len(c))] ^= 1 << rnd.IntN(8)
			}
			k.copies[digest] = c
			break
		}
		k.mu.Unlock()
		off := rnd.Int64N(d.Size())
		checkRead(t, d, m.flat, off, rnd.Int64N(min(60_000, d.Size()-off)+1))
		if n == 1500 {
			d = m.device(t, noMemory(k))
		}
	}
	if s := d.Stats(); s.DiskCorrupt == 0 || s.Disk.Reads == 0 || s.Errors != 0 {
		t.Errorf("got %+v, want damage found, reads answered by the disk, and no error", s)
	}
}

func TestTheAnswerComesBeforeTheOffer(t *testing.T) {
	m := makeImage(t, 30)
	k := newDisk()
	k.block = make(chan struct{})
	d := m.device(t, noMemory(k))
	checkRead(t, d, m.flat, m.dataOff(3), 100) // hangs when the offer comes first
	close(k.block)
	d.Close()
	if k.offered != 1 {
		t.Errorf("%d chunks offered, want 1", k.offered)
	}
}

func TestAFailingDiskIsNoCache(t *testing.T) {
	m := makeImage(t, 30)
	k := newDisk()
	k.fail = fmt.Errorf("%w: input/output error", store.ErrLocalDisk)
	d := m.device(t, noMemory(k))
	checkRead(t, d, m.flat, 0, d.Size())
	if s := d.Stats(); s.Errors != 0 || s.DiskFailed == 0 {
		t.Errorf("got %+v, want no error, and the disk's counted", s)
	}
	clear(m.store.chunks)
	var re *blockdev.ReadError
	err := d.ReadAt(t.Context(), make([]byte, 1), m.dataOff(0))
	if !errors.As(err, &re) || re.Outcome != store.Missing {
		t.Errorf("neither disk nor store has the chunk: got %v, want the store's outcome", err)
	}
}

func TestAHangingDiskIsLeftAlone(t *testing.T) {
	m := makeImage(t, 60)
	synctest.Test(t, func(t *testing.T) {
		k := newDisk()
		k.hang = make(chan struct{})
		d := m.device(t, noMemory(k))
		checkRead(t, d, m.flat, m.dataOff(0), 100)
		if s := d.Stats(); s.DiskFailed != 1 || s.Store.Reads != 1 {
			t.Errorf("got %+v, want the store to answer", s)
		}
		asked := d.Stats().DiskFailed
		checkRead(t, d, m.flat, 0, d.Size())
		for _, r := range d.Slowest()[1:] {
			if r.Wait != 0 {
				t.Errorf("a read waited %v for a disk that is known to hang", r.Wait)
			}
		}
		if d.Stats().DiskFailed == asked {
			t.Error("reads that the disk was not asked for are not counted")
		}
		close(k.hang)
	})
}

func TestDiskOfAnotherImageServesItsChunks(t *testing.T) {
	m := makeImage(t, 60)
	k := newDisk()
	first := m.device(t, noMemory(k))
	checkRead(t, first, m.flat, 0, first.Size())
	first.Close()
	second := m.device(t, noMemory(k), func(c *blockdev.Config) {
		c.Chunks = getBatch(func(context.Context, []chunk.Digest, func(chunk.Digest, []byte, error) error) error {
			return store.ErrUnreachable
		})
	})
	checkRead(t, second, m.flat, 0, second.Size())
}

// aheadDisk is a disk that keeps apart what no read has asked for.
type aheadDisk struct {
	*disk
	speculative, touched map[chunk.Digest]int
}

func (k *aheadDisk) OfferSpeculative(d chunk.Digest, p []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.speculative[d]++
	k.copies[d] = bytes.Clone(p)
}

func (k *aheadDisk) Touch(d chunk.Digest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.touched[d]++
}

func TestTheDiskIsToldWhatNobodyHasAskedFor(t *testing.T) {
	m := makeDirs(t, 1, 8, 8192)
	synctest.Test(t, func(t *testing.T) {
		k := &aheadDisk{newDisk(), map[chunk.Digest]int{}, map[chunk.Digest]int{}}
		d := m.device(t, func(c *blockdev.Config) { c.GroupBytes, c.Disk = 4*8192, k })
		checkRead(t, d, m.flat, m.dataOff(1), 4096) // brings 0, 2 and 3
		synctest.Wait()
		checkRead(t, d, m.flat, m.dataOff(2), 4096)
		checkRead(t, d, m.flat, m.dataOff(2)+4096, 4096)
		digest := func(i int) chunk.Digest { return m.img.Blob.Chunks[i].Digest }
		if k.offered != 1 || len(k.speculative) != 3 || k.speculative[digest(1)] != 0 {
			t.Errorf("%d chunks offered, speculatively %v, want chunk 1, and 0, 2, 3", k.offered, k.speculative)
		}
		if len(k.touched) != 1 || k.touched[digest(2)] != 1 {
			t.Errorf("touched %v, want chunk 2 once", k.touched)
		}
	})
}
