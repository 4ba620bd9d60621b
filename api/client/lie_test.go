package client_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/klauspost/compress/zstd"

	"quarry/api"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

// lie returns a client of a server with that handler, which makes three attempts
// and is patient: a busy machine is not silence. What is about silence runs in
// memory.
func lie(t testing.TB, h http.HandlerFunc) *client.Client {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", api.TypeFrames)
		h(w, r)
	}))
	t.Cleanup(srv.Close)
	return connect(t, client.Config{URL: srv.URL, Attempts: 3})
}

// stall sends what was written and then nothing until the client leaves.
func stall(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

// bomb is a zstd frame of size zeros.
func bomb(t testing.TB, size int, opts ...zstd.EOption) []byte {
	t.Helper()
	enc, err := zstd.NewWriter(nil, append(opts, zstd.WithSingleSegment(true))...)
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	return enc.EncodeAll(make([]byte, size), nil)
}

func TestALyingServerIsFoundOut(t *testing.T) {
	p := bytes.Repeat([]byte("the chunk "), 100)
	other := []byte("another chunk")
	good := frameOf(p)
	with := func(change func(*api.Frame)) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) {
			f := good
			change(&f)
			answer(w, f)
		}
	}
	stored := func(b []byte, codec pack.Codec, plain uint32) func(http.ResponseWriter, *http.Request) {
		return with(func(f *api.Frame) { f.Stored, f.Codec, f.Len, f.CRC = b, codec, plain, pack.Checksum(b) })
	}
	body := func(change func([]byte) []byte) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) {
			rec := httptest.NewRecorder()
			answer(rec, good)
			w.Write(change(rec.Body.Bytes()))
		}
	}
	tests := map[string]struct {
		lie     func(http.ResponseWriter, *http.Request)
		corrupt bool // want *store.CorruptError
	}{
		"nothing":             {func(http.ResponseWriter, *http.Request) {}, false},
		"no frame, right end": {func(w http.ResponseWriter, _ *http.Request) { answer(w) }, false},
		"no end frame":        {body(func(b []byte) []byte { return append(b[:12:12], b[12:16]...) }), false},
		"a body cut off":      {body(func(b []byte) []byte { return b[:20] }), false},
		"a byte too many":     {body(func(b []byte) []byte { return append(b, 0) }), false},
		"an HTML page": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprint(w, "<html>")
		}, false},
		"frames that are HTML": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html><body>It works!</body></html>") }, false},
		"206 for 200":          {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(206); answer(w, good) }, false},
		"204 for 200":          {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, false},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}, false},
		"the answer twice":      {func(w http.ResponseWriter, _ *http.Request) { answer(w, good, good) }, false},
		"another chunk as well": {func(w http.ResponseWriter, _ *http.Request) { answer(w, frameOf(other), good) }, false},
		"another chunk":         {func(w http.ResponseWriter, _ *http.Request) { answer(w, frameOf(other)) }, false},
		"a length header too long": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			w.Write([]byte("QRYBATCH"))
		}, false},
		"another chunk's bytes":  {stored(other, pack.Raw, uint32(len(other))), true},
		"a flipped byte, raw":    {stored(append([]byte{'T'}, p[1:]...), pack.Raw, uint32(len(p))), true},
		"a wrong checksum":       {with(func(f *api.Frame) { f.CRC ^= 1 }), true},
		"a short chunk":          {stored(p[:50], pack.Raw, 50), true},
		"a longer chunk":         {stored(append(bytes.Clone(p), 'x'), pack.Raw, uint32(len(p)+1)), true},
		"zstd of something else": {stored(frameOf(make([]byte, 1000)).Stored, pack.Zstd, 1000), true},
		"zstd that is none":      {stored([]byte("not zstd at all"), pack.Zstd, 1000), true},
		"a bomb":                 {stored(bomb(t, 4<<20), pack.Zstd, uint32(len(p))), true},
		"a bomb that admits it":  {stored(bomb(t, 256<<20)[:1<<10], pack.Zstd, chunk.MaxSize), true},
		"a corrupt chunk, it says": {func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.Frame{Digest: good.Digest, Status: api.StatusCorrupt})
		}, true},
		"an error, it says": {func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.Frame{Digest: good.Digest, Status: api.StatusError})
		}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := lie(t, tt.lie)
			got, err := c.Get(t.Context(), good.Digest, nil)
			if err == nil {
				t.Fatalf("the lie was taken for a chunk of %d bytes", len(got))
			}
			var ce *store.CorruptError
			if errors.As(err, &ce) != tt.corrupt {
				t.Errorf("got error %v, want a CorruptError: %t", err, tt.corrupt)
			}
			if n := c.Stats().Requests; n > 3 {
				t.Errorf("%d attempts, at most 3 are allowed", n)
			}
		})
	}
}

func TestALyingLengthIsRefusedWithoutTakingMemory(t *testing.T) {
	want := chunk.Sum([]byte("x"))
	c := lie(t, func(w http.ResponseWriter, _ *http.Request) {
		rec := httptest.NewRecorder()
		answer(rec, frameOf([]byte("x")))
		b := rec.Body.Bytes()
		binary.LittleEndian.PutUint32(b[16:], 1<<32-1)
		w.Write(b)
	})
	before := allocated()
	if _, err := c.Get(t.Context(), want, nil); err == nil {
		t.Error("a frame of 4 GiB was accepted")
	}
	if n := allocated() - before; n > 8<<20 {
		t.Errorf("a frame that lies about its length made the client allocate %d bytes", n)
	}
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// drip sends an answer in pieces of size bytes with a pause after each.
func drip(size int, pause time.Duration, f api.Frame) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := httptest.NewRecorder()
		answer(rec, f)
		for part := range slices.Chunk(rec.Body.Bytes(), size) {
			w.Write(part)
			http.NewResponseController(w).Flush()
			select {
			case <-time.After(pause):
			case <-r.Context().Done():
				return
			}
		}
	}
}

// A store that sends a byte now and then would hold a worker for ever.
func TestAStoreThatDripsIsSilent(t *testing.T) {
	p := []byte("a chunk of some bytes")
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, "drips", drip(1, time.Second, frameOf(p)))
		if _, err := c.Get(t.Context(), chunk.Sum(p), nil); !errors.Is(err, client.ErrSilent) {
			t.Errorf("got error %v, want ErrSilent", err)
		}
	})
}

// A job has nothing to say for minutes but that it is alive.
func TestAJobThatIsAliveIsNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, "a", func(w http.ResponseWriter, _ *http.Request) {
			for range 50 {
				fmt.Fprintln(w, `{"type":"alive"}`)
				http.NewResponseController(w).Flush()
				time.Sleep(20 * time.Second) // the idle timeout is 30 s
			}
			fmt.Fprintln(w, `{"type":"result","result":{"packs":1,"chunks":2}}`)
		})
		if r, err := c.Rebuild(t.Context()); err != nil || r.Chunks != 2 {
			t.Errorf("got %+v, error %v", r, err)
		}
	})
}

func TestSilenceIsATimeoutAndSlownessIsNot(t *testing.T) {
	p := []byte("chunk")
	synctest.Test(t, func(t *testing.T) {
		want := chunk.Sum(p)
		for name, h := range map[string]http.HandlerFunc{
			"before the headers": stall,
			"after the headers":  func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(200); stall(w, r) },
		} {
			c := inMemory(t, "silent", h)
			if _, err := c.Get(t.Context(), want, nil); !errors.Is(err, client.ErrSilent) {
				t.Errorf("silent server, %s: got error %v", name, err)
			}
			if n := c.Stats().Requests; n != 4 {
				t.Errorf("silent server, %s: %d attempts, want 4", name, n)
			}
			if p, err := c.Bootstrap(t.Context(), want, int64(len(p))); err == nil {
				t.Errorf("silent server, %s: bootstrap of %d bytes", name, len(p))
			}
		}
		large := make([]byte, 128<<10)
		rand.NewChaCha8([32]byte{}).Read(large)
		slow := inMemory(t, "slow", drip(20<<10, 20*time.Second, frameOf(large)))
		if got, err := slow.Get(t.Context(), chunk.Sum(large), nil); err != nil || !bytes.Equal(got, large) {
			t.Errorf("slow server: got %d bytes, error %v", len(got), err)
		}
		honest := inMemory(t, "good", func(w http.ResponseWriter, _ *http.Request) { answer(w, frameOf(p), frameOf([]byte("2"))) })
		ds := []chunk.Digest{chunk.Sum(p), chunk.Sum([]byte("2"))}
		err := honest.GetBatch(t.Context(), ds, func(_ chunk.Digest, _ []byte, err error) error {
			time.Sleep(time.Hour) // longer than the idle timeout, but ours
			return err
		})
		if err != nil {
			t.Errorf("slow caller: got error %v", err)
		}
	})
}

func TestAChunkThatArrivedBeforeTheSilenceCounts(t *testing.T) {
	p := []byte("chunk")
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, "stalls", func(w http.ResponseWriter, r *http.Request) {
			if err := api.NewFrameWriter(w).Write(frameOf(p)); err == nil {
				stall(w, r)
			}
		})
		if got, err := c.Get(t.Context(), chunk.Sum(p), nil); err != nil || !bytes.Equal(got, p) {
			t.Errorf("got %q, error %v", got, err)
		}
	})
}

func TestLiesAboutBootstrapsAndConfigs(t *testing.T) {
	want := bytes.Repeat([]byte("bootstrap"), 1000)
	d, size := chunk.Sum(want), int64(len(want))
	encoded := func(b []byte) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Encoding", "zstd"); w.Write(b) }
	}
	plain := func(b []byte) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) { w.Write(b) }
	}
	tests := map[string]func(http.ResponseWriter, *http.Request){
		"empty":            plain(nil),
		"short":            plain(want[1:]),
		"long":             plain(append(bytes.Clone(want), 0)),
		"other bytes":      plain(bytes.Repeat([]byte("Bootstrap"), 1000)),
		"endless":          plain(make([]byte, 8<<20)),
		"a bomb":           encoded(bomb(t, 128<<20)),
		"a large window":   encoded(bomb(t, 512<<20, zstd.WithWindowSize(128<<20))),
		"zstd cut off":     encoded(frameOf(want).Stored[:30]),
		"zstd that is not": encoded(want),
		"gzip": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(want)
		},
		"an HTML error": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<html>", 500) },
		"a huge error":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500); w.Write(make([]byte, 8<<20)) },
	}
	for name, h := range tests {
		t.Run(name, func(t *testing.T) {
			c := lie(t, h)
			before := allocated()
			if p, err := c.Bootstrap(t.Context(), d, size); err == nil {
				t.Errorf("the lie was taken for a bootstrap of %d bytes", len(p))
			}
			if n := allocated() - before; n > 64<<20 {
				t.Errorf("the client allocated %d bytes", n)
			}
		})
	}
	c := lie(t, plain(want))
	if got, err := c.Bootstrap(t.Context(), d, size); err != nil || !bytes.Equal(got, want) {
		t.Errorf("honest server: %d bytes, error %v", len(got), err)
	}
	if _, err := c.Bootstrap(t.Context(), d, 1<<40); err == nil {
		t.Error("a bootstrap of 1 TiB was asked for")
	}
	if _, err := c.Config(t.Context(), chunk.Sum(nil)); !errors.Is(err, api.ErrObjectCorrupt) {
		t.Errorf("another config: got error %v", err)
	}
}

func TestLiesAboutImages(t *testing.T) {
	ref := image.Ref{Repo: "a", Tag: "b"}
	for _, body := range []string{
		"", "{}", "null", "[]", `{"status":"ready"}`, `{"status":"ready","image":{}}`, `{"status":"ready","name":{},"image":null}`,
		`{"status":"pending","name":{},"image":{}}`, `{"status":"ready","name":{},"image":{}`, strings.Repeat(" ", api.MaxJSON+1),
	} {
		c := lie(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) })
		if doc, err := c.Image(t.Context(), ref, image.HostPlatform()); err == nil {
			t.Errorf("%.40q was taken for an image: %+v", body, doc)
		}
	}
	endless := lie(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"names":[],"next":"a:b"}`) })
	if _, err := endless.Names(t.Context()); err == nil {
		t.Error("names without end were accepted")
	}
}
