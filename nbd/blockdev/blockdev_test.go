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
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

const chunkSize = 16 << 10

// memory is a store.BatchGetter over a map. It answers in reverse order, from a
// buffer it spoils afterwards, as a careless but correct store may.
type memory struct {
	chunks  map[chunk.Digest][]byte
	gate    func(ctx context.Context, ds []chunk.Digest) error // called first when set
	batches atomic.Int64
}

func (m *memory) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	m.batches.Add(1)
	if m.gate != nil {
		if err := m.gate(ctx, ds); err != nil {
			return err
		}
	}
	for i := len(ds) - 1; i >= 0; i-- {
		p, ok := m.chunks[ds[i]]
		var err error
		if !ok {
			err = store.ErrNotFound
		}
		p = bytes.Clone(p)
		if err := fn(ds[i], p, err); err != nil {
			return err
		}
		clear(p)
	}
	return nil
}

// image is an encoded tree and the bytes its device must have.
type image struct {
	boot  []byte
	img   *rafs.Image
	store *memory
	flat  []byte
	files map[string][]byte
}

// makeImage encodes a tree of files of all awkward lengths, one of which repeats
// another's chunks.
func makeImage(t testing.TB, files int) *image {
	t.Helper()
	m := &image{store: &memory{chunks: map[chunk.Digest][]byte{}}, files: map[string][]byte{}}
	rnd := rand.NewChaCha8([32]byte{7})
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	for i := range files {
		p := make([]byte, []int{0, 1, 4095, 4096, 4097, chunkSize, chunkSize + 1, 3*chunkSize - 1, 5 * chunkSize}[i%9])
		rnd.Read(p)
		if i == files-1 {
			p = m.files["f0008"]
		}
		name := fmt.Sprintf("f%04d", i)
		m.files[name] = p
		n := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(len(p))}
		for c := range chunksOf(p) {
			n.Chunks = append(n.Chunks, chunk.Sum(c))
			m.store.chunks[chunk.Sum(c)] = c
		}
		root.Entries = append(root.Entries, rafs.Dirent{Name: name, Inode: n})
	}
	m.encode(t, root)
	return m
}

func chunksOf(p []byte) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for ; len(p) > 0; p = p[min(chunkSize, len(p)):] {
			if !yield(p[:min(chunkSize, len(p))]) {
				return
			}
		}
	}
}

func (m *image) encode(t testing.TB, root *rafs.Inode) {
	t.Helper()
	m.encodeSized(t, root, chunkSize)
}

func (m *image) encodeSized(t testing.TB, root *rafs.Inode, chunkSize uint32) {
	t.Helper()
	var err error
	if m.boot, err = rafs.Encode(&rafs.Tree{ChunkSize: chunkSize, Root: root}); err != nil {
		t.Fatal(err)
	}
	if m.img, err = rafs.Decode(m.boot); err != nil {
		t.Fatal(err)
	}
	m.flat = make([]byte, m.img.DeviceSize())
	copy(m.flat, m.boot)
	if b := m.img.Blob; b != nil {
		for _, c := range b.Chunks {
			copy(m.flat[b.MappedOff+c.DevOff:], m.store.chunks[c.Digest])
		}
	}
}

func (m *image) device(t testing.TB, configure ...func(*blockdev.Config)) *blockdev.Device {
	t.Helper()
	cfg := blockdev.Config{Bootstrap: m.boot, Image: m.img, Chunks: m.store, GroupBytes: -1, Alone: -1}
	for _, f := range configure {
		f(&cfg)
	}
	d, err := blockdev.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// dataOff is where chunk i of the blob stands in the flattened device.
func (m *image) dataOff(i int) int64 { return m.img.Blob.MappedOff + m.img.Blob.Chunks[i].DevOff }

func checkRead(t *testing.T, d nbd.Device, want []byte, off, n int64) {
	t.Helper()
	p := bytes.Repeat([]byte{0xa5}, int(n))
	if err := d.ReadAt(t.Context(), p, off); err != nil {
		t.Fatalf("read of %d at %d: %v", n, off, err)
	}
	if !bytes.Equal(p, want[off:off+n]) {
		t.Fatalf("read of %d at %d gives other bytes", n, off)
	}
}

func TestDeviceIsTheFlattenedImage(t *testing.T) {
	m := makeImage(t, 60)
	d := m.device(t)
	if d.Size() != int64(len(m.flat)) || d.Size()%4096 != 0 {
		t.Fatalf("size %d, want %d", d.Size(), len(m.flat))
	}
	checkRead(t, d, m.flat, 0, d.Size())
	checkRead(t, d, m.flat, d.Size(), 0)
	edges := []int64{0, int64(len(m.boot)), m.img.Blob.MappedOff, d.Size()}
	for i, c := range m.img.Blob.Chunks {
		edges = append(edges, m.dataOff(i), m.dataOff(i)+int64(c.Len))
	}
	for _, e := range edges { // around every edge there is
		for _, r := range [][2]int64{{-1, 2}, {0, 1}, {-1, 1}, {-4096, 8192}, {-5, 40000}} {
			off := max(e+r[0], 0)
			checkRead(t, d, m.flat, min(off, d.Size()), max(min(r[1], d.Size()-off), 0))
		}
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		off := rnd.Int64N(d.Size())
		checkRead(t, d, m.flat, off, rnd.Int64N(min(100_000, d.Size()-off)+1))
	}
	for _, r := range [][2]int64{{-1, 1}, {d.Size(), 1}, {d.Size() - 1, 2}, {1<<63 - 1, 1}} {
		if err := d.ReadAt(t.Context(), make([]byte, r[1]), r[0]); err == nil {
			t.Errorf("read of %d at %d succeeded", r[1], r[0])
		}
	}
}

func TestImageWithoutData(t *testing.T) {
	m := makeImage(t, 1) // one empty file
	d := m.device(t)
	checkRead(t, d, m.boot, 0, int64(len(m.boot)))
	if d.Size() != int64(len(m.boot)) {
		t.Errorf("an image without data has a device of %d bytes", d.Size())
	}
}

func TestManyReadersMakeOneFetch(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		m.store.gate = func(context.Context, []chunk.Digest) error { <-release; return nil }
		d := m.device(t)
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(3), 100) })
		}
		synctest.Wait() // all are waiting
		close(release)
		wg.Wait()
		if s := d.Stats(); s.Requests != 1 || s.Store.Fetched.Chunks != 1 || s.ReadBytes != 6400 || s.Store.Fetched.Bytes != int64(m.img.Blob.Chunks[3].Len) {
			t.Errorf("64 readers of one chunk: %+v, want 1 fetch of 1 chunk", s)
		}
	})
}

func TestOneReadMakesOneBatch(t *testing.T) {
	m := makeImage(t, 60)
	d := m.device(t)
	checkRead(t, d, m.flat, m.dataOff(10), m.dataOff(20)-m.dataOff(10)) // chunks 10 to 19
	checkRead(t, d, m.flat, m.dataOff(5), m.dataOff(25)-m.dataOff(5))
	if s := d.Stats(); s.Requests != 2 || s.Store.Fetched.Chunks != 20 {
		t.Errorf("got %+v, want 20 chunks in 2 fetches", s)
	}
}

func TestCancelledLeaderFailsNobodyElse(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		m.store.gate = func(ctx context.Context, _ []chunk.Digest) error {
			select {
			case <-time.After(10 * time.Second):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		d := m.device(t)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := d.ReadAt(ctx, make([]byte, 10), m.dataOff(0)); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled reader got %v", err)
			}
		})
		synctest.Wait()
		wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(0), 10) })
		synctest.Wait()
		cancel()
		wg.Wait()
		if s := d.Stats(); s.Requests != 1 || s.Errors != 0 {
			t.Errorf("got %+v, want the one fetch to go on", s)
		}
	})
}

func TestLateJoinerOutlivesTheFetchItJoined(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		stalled := true // the first fetch never ends by itself
		m.store.gate = func(ctx context.Context, _ []chunk.Digest) error {
			if stalled {
				stalled = false
				<-ctx.Done()
			}
			return ctx.Err()
		}
		d := m.device(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			err := d.ReadAt(t.Context(), make([]byte, 10), m.dataOff(0))
			var re *blockdev.ReadError
			if !errors.As(err, &re) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("first reader got %v, want the fetch's deadline", err)
			}
		})
		time.Sleep(blockdev.DefaultTimeout - time.Second)
		wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(0), 10) })
		wg.Wait()
	})
}

func TestErrorReachesOnlyReadsThatTouchItsChunk(t *testing.T) {
	m := makeImage(t, 60)
	bad := m.img.Blob.Chunks[20]
	good := m.store.chunks[bad.Digest]
	delete(m.store.chunks, bad.Digest)
	var log bytes.Buffer
	var told []*blockdev.ReadError
	d := m.device(t, func(c *blockdev.Config) {
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
		c.OnError = func(e *blockdev.ReadError) { told = append(told, e) }
	})
	err := d.ReadAt(t.Context(), make([]byte, d.Size()), 0)
	var re *blockdev.ReadError
	if !errors.As(err, &re) || !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("read of everything: got %v, want a ReadError of ErrNotFound", err)
	}
	wantPath := ""
	m.img.Walk(func(path string, n *rafs.Inode) error {
		for _, c := range n.Chunks {
			if c == bad.Digest && wantPath == "" {
				wantPath = path
			}
		}
		return nil
	})
	if re.Chunk != bad.Digest || re.Path != wantPath || re.Off != m.dataOff(20) {
		t.Errorf("error speaks of chunk %s of %s at %d, want %s of %s at %d", re.Chunk, re.Path, re.Off, bad.Digest, wantPath, m.dataOff(20))
	}
	if len(told) != 1 || told[0] != re || !strings.Contains(log.String(), bad.Digest.String()) || !strings.Contains(log.String(), wantPath) {
		t.Errorf("OnError was told of %v, the log says\n%s", told, log.String())
	}
	checkRead(t, d, m.flat, 0, m.dataOff(20))
	checkRead(t, d, m.flat, m.dataOff(21), d.Size()-m.dataOff(21))
	m.store.chunks[bad.Digest] = good // errors are not kept
	checkRead(t, d, m.flat, 0, d.Size())
	if s := d.Stats(); s.Errors != 1 {
		t.Errorf("got %+v, want 1 error", s)
	}
}

func TestStoreThatBreaksItsContract(t *testing.T) {
	m := makeImage(t, 30)
	c := m.img.Blob.Chunks[4]
	for name, get := range map[string]getBatch{
		"a short chunk": func(_ context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
			return fn(ds[0], m.store.chunks[ds[0]][:c.Len-1], nil)
		},
		"no answer": func(context.Context, []chunk.Digest, func(chunk.Digest, []byte, error) error) error {
			return nil
		},
		"another chunk": func(_ context.Context, _ []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
			return fn(chunk.Sum(nil), make([]byte, c.Len), nil)
		},
		"an error of the whole batch": func(context.Context, []chunk.Digest, func(chunk.Digest, []byte, error) error) error {
			return errors.New("unreachable")
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := m.device(t, func(c *blockdev.Config) { c.Chunks = get })
			var re *blockdev.ReadError
			if err := d.ReadAt(t.Context(), make([]byte, 1), m.dataOff(4)); !errors.As(err, &re) {
				t.Errorf("got %v, want a ReadError", err)
			}
		})
	}
	t.Run("an answer twice", func(t *testing.T) {
		d := m.device(t, func(cfg *blockdev.Config) {
			cfg.Chunks = getBatch(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
				fn(ds[0], m.store.chunks[ds[0]], nil)
				return fn(ds[0], make([]byte, c.Len), nil)
			})
		})
		checkRead(t, d, m.flat, m.dataOff(4), int64(c.Len))
	})
}

// getBatch is a store.BatchGetter of one function.
type getBatch func(context.Context, []chunk.Digest, func(chunk.Digest, []byte, error) error) error

func (g getBatch) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	return g(ctx, ds, fn)
}

func TestMemoryIsBoundedAndKeepsWhatIsUsed(t *testing.T) {
	m := makeImage(t, 60)
	const limit = 4 * chunkSize
	d := m.device(t, func(c *blockdev.Config) { c.Memory = blockdev.NewMemory(limit) })
	full := -1 // a chunk of full length
	for i, c := range m.img.Blob.Chunks {
		if c.Len == chunkSize {
			full = i
			break
		}
	}
	for i := range m.img.Blob.Chunks {
		checkRead(t, d, m.flat, m.dataOff(full), 1) // always the one used last
		checkRead(t, d, m.flat, m.dataOff(i), 1)
	}
	if s := d.Stats(); s.Store.Fetched.Chunks != int64(len(m.img.Blob.Chunks)) {
		t.Errorf("%d chunks fetched, want each of %d once", s.Store.Fetched.Chunks, len(m.img.Blob.Chunks))
	}
	before := d.Stats().Store.Fetched.Chunks
	for i := range m.img.Blob.Chunks {
		checkRead(t, d, m.flat, m.dataOff(i), 1)
	}
	if again := d.Stats().Store.Fetched.Chunks - before; again < int64(len(m.img.Blob.Chunks))*9/10 {
		t.Errorf("only %d of %d chunks were fetched again from a cache of %d bytes", again, len(m.img.Blob.Chunks), limit)
	}
	none := m.device(t, func(c *blockdev.Config) { c.Memory = blockdev.NewMemory(-1) })
	checkRead(t, none, m.flat, 0, none.Size())
	checkRead(t, none, m.flat, m.dataOff(0), 1)
	if s := none.Stats(); s.Requests != 2 {
		t.Errorf("without a cache: %+v, want 2 fetches", s)
	}
}

func TestCloseEndsFetches(t *testing.T) {
	m := makeImage(t, 30)
	started := make(chan struct{})
	m.store.gate = func(ctx context.Context, _ []chunk.Digest) error {
		close(started)
		<-ctx.Done()
		return ctx.Err()
	}
	d := m.device(t)
	read := make(chan error, 1)
	go func() { read <- d.ReadAt(t.Context(), make([]byte, 1), m.dataOff(0)) }() // ends by Close
	<-started
	d.Close()
	if err := <-read; !errors.Is(err, blockdev.ErrClosed) {
		t.Errorf("read during Close got %v", err)
	}
	if err := d.ReadAt(t.Context(), make([]byte, 1), m.dataOff(0)); !errors.Is(err, blockdev.ErrClosed) {
		t.Errorf("read after Close got %v, want ErrClosed", err)
	}
}

func TestNewRefusesAnotherImagesBootstrap(t *testing.T) {
	m := makeImage(t, 30)
	if _, err := blockdev.New(blockdev.Config{Bootstrap: m.boot[:4096], Image: m.img, Chunks: m.store}); err == nil {
		t.Error("New took a bootstrap of another length")
	}
}

func TestDevicesShareOneMemory(t *testing.T) {
	m := makeImage(t, 60)
	shared := blockdev.NewMemory(0)
	first := m.device(t, func(c *blockdev.Config) { c.Memory = shared })
	second := m.device(t, func(c *blockdev.Config) { c.Memory = shared })
	checkRead(t, first, m.flat, 0, first.Size())
	checkRead(t, second, m.flat, 0, second.Size())
	if s := second.Stats(); s.Requests != 0 {
		t.Errorf("the second device fetched what the first had: %+v", s)
	}
}
