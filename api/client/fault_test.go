package client_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// faultChunks is the size of the batches here; the chunk that is lied about, the
// victim, comes last in an answer.
const faultChunks = 5

// exchange is one batchGet at a faulty node, with what an honest one answers.
type exchange struct {
	w      http.ResponseWriter
	r      *http.Request
	frames []api.Frame // of a real store, the victim's last
}

// body encodes frames as an answer.
func (x *exchange) body(frames ...api.Frame) []byte {
	var b bytes.Buffer
	fw := api.NewFrameWriter(&b)
	for _, f := range frames {
		if fw.Write(f) != nil {
			panic("a buffer takes all")
		}
	}
	if fw.Close() != nil {
		panic("a buffer takes all")
	}
	return b.Bytes()
}

// victim changes the victim's frame, if it was asked for, and answers.
func (x *exchange) victim(v chunk.Digest, change func(*api.Frame)) {
	for i := range x.frames {
		if x.frames[i].Digest == v {
			change(&x.frames[i])
		}
	}
	x.send(200, x.body(x.frames...))
}

func (x *exchange) send(status int, body []byte) {
	x.w.Header().Set("Content-Type", api.TypeFrames)
	x.w.WriteHeader(status)
	x.w.Write(body)
}

// raw takes the connection over, writes an answer with that Content-Length and
// resets the connection.
func (x *exchange) raw(head string, length int, body []byte) {
	conn, buf, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	fmt.Fprintf(buf, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n", api.TypeFrames, length, head)
	buf.Write(body)
	buf.Flush()
	conn.(*net.TCPConn).SetLinger(0)
}

// fault is a way in which a node's answers go wrong.
type fault struct {
	serve func(x *exchange, v chunk.Digest)
	// What a batch gets when its only store always answers so: how many chunks
	// have an error (some: one or more) and of which outcome. The others are right.
	fails   int
	outcome store.Outcome
	settled bool // asking this store again does not help
}

const (
	some    = -1
	perhaps = -2 // any number, none included
)

func faults(t *testing.T) map[string]fault {
	garbage := []byte("<html><body>It works!</body></html>")
	all := func(x *exchange) []byte { return x.body(x.frames...) }
	stored := func(b []byte, codec pack.Codec, plain uint32) func(*exchange, chunk.Digest) {
		return func(x *exchange, v chunk.Digest) {
			x.victim(v, func(f *api.Frame) { f.Stored, f.Codec, f.Len, f.CRC = b, codec, plain, pack.Checksum(b) })
		}
	}
	// header answers with the header of the victim's frame changed: it is the last
	// before the end frame.
	header := func(off int, value uint32) func(*exchange, chunk.Digest) {
		return func(x *exchange, v chunk.Digest) {
			body := all(x)
			if last := x.frames[len(x.frames)-1]; last.Digest == v {
				binary.LittleEndian.PutUint32(body[len(body)-2*48-len(last.Stored)+off:], value)
			}
			x.send(200, body)
		}
	}
	status := func(code int, headers ...string) func(*exchange, chunk.Digest) {
		return func(x *exchange, _ chunk.Digest) {
			for i := 0; i < len(headers); i += 2 {
				x.w.Header().Set(headers[i], headers[i+1])
			}
			http.Error(x.w, "no", code)
		}
	}
	says := func(s api.Status) func(*exchange, chunk.Digest) {
		return func(x *exchange, v chunk.Digest) {
			x.victim(v, func(f *api.Frame) { *f = api.Frame{Digest: v, Status: s, Reason: "it says so"} })
		}
	}
	big := bomb(t, 64<<20)
	return map[string]fault{
		"206 for 200": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Content-Range", "bytes 0-99/100")
			x.send(206, all(x))
		}, faultChunks, store.Unreachable, false},
		"204 for 200": {func(x *exchange, _ chunk.Digest) { x.w.WriteHeader(204) }, faultChunks, store.Unreachable, false},
		"200 with Content-Range and a part": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Content-Range", "bytes 100-999/1000")
			x.send(200, all(x)[100:])
		}, faultChunks, store.Unreachable, false},
		"200 with Content-Range and all": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Content-Range", "bytes 0-999/1000")
			x.send(200, all(x))
		}, 0, "", false},
		"short body, right length, reset": {func(x *exchange, _ chunk.Digest) {
			b := all(x)
			x.raw("", len(b), b[:40])
		}, faultChunks, store.Unreachable, false},
		"reset in the last frame": {func(x *exchange, _ chunk.Digest) {
			b := all(x)
			x.raw("", len(b), b[:len(b)-60])
		}, some, store.Unreachable, false},
		"length shorter than the body": {func(x *exchange, _ chunk.Digest) { b := all(x); x.raw("", len(b)-60, b) }, some, store.Unreachable, false},
		"long body":                    {func(x *exchange, _ chunk.Digest) { x.send(200, append(all(x), garbage...)) }, 0, "", false},
		"empty":                        {func(x *exchange, _ chunk.Digest) { x.send(200, nil) }, faultChunks, store.Unreachable, false},
		"reset before the headers": {func(x *exchange, _ chunk.Digest) {
			panic(http.ErrAbortHandler)
		}, faultChunks, store.Unreachable, false},
		"headers that are none": {func(x *exchange, _ chunk.Digest) {
			x.raw("Transfer-Encoding: chunked\r\nContent-Length: 3\r\nno header\r\n", 9, garbage)
		}, faultChunks, store.Unreachable, false},
		"frames reordered": {func(x *exchange, _ chunk.Digest) { slices.Reverse(x.frames); x.send(200, all(x)) }, 0, "", false},
		"a frame repeated at once": {func(x *exchange, _ chunk.Digest) {
			x.send(200, x.body(append([]api.Frame{x.frames[0]}, x.frames...)...))
		}, some, store.Unreachable, false},
		"a frame repeated at the end": {func(x *exchange, _ chunk.Digest) {
			x.send(200, x.body(append(x.frames, x.frames[0])...))
		}, 0, "", false},
		"a chunk that was not asked for": {func(x *exchange, _ chunk.Digest) {
			x.send(200, x.body(append([]api.Frame{frameOf([]byte("not asked for"))}, x.frames...)...))
		}, faultChunks, store.Unreachable, false},
		"a frame left out": {func(x *exchange, v chunk.Digest) {
			x.send(200, x.body(slices.DeleteFunc(x.frames, func(f api.Frame) bool { return f.Digest == v })...))
		}, 1, store.Unreachable, false},
		"no end frame": {func(x *exchange, _ chunk.Digest) { b := all(x); x.send(200, b[:len(b)-48]) }, 0, "", false},
		"a wrong count": {func(x *exchange, _ chunk.Digest) {
			b := all(x)
			b[len(b)-44]++
			x.send(200, b)
		}, 0, "", false},
		"another version": {func(x *exchange, _ chunk.Digest) {
			b := all(x)
			b[8]++
			x.send(200, b)
		}, faultChunks, store.Unreachable, false},
		"gzip that was not asked for": {func(x *exchange, _ chunk.Digest) {
			var b bytes.Buffer
			zw := gzip.NewWriter(&b)
			zw.Write(all(x))
			zw.Close()
			x.w.Header().Set("Content-Encoding", "gzip")
			x.send(200, b.Bytes())
		}, faultChunks, store.Unreachable, false},
		"an HTML page": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Content-Type", "text/html")
			x.w.Write(garbage)
		}, faultChunks, store.Unreachable, false},
		"an HTML page that says it is frames": {func(x *exchange, _ chunk.Digest) { x.send(200, garbage) }, faultChunks, store.Unreachable, false},
		"a redirect": {func(x *exchange, _ chunk.Digest) {
			http.Redirect(x.w, x.r, "/expired", http.StatusTemporaryRedirect)
		}, faultChunks, store.Unreachable, false},
		"401":                             {status(401, "WWW-Authenticate", "Basic"), faultChunks, store.Unauthorised, true},
		"403":                             {status(403), faultChunks, store.Unauthorised, true},
		"404":                             {status(404), faultChunks, store.Unreachable, false},
		"429":                             {status(429, "Retry-After", "0"), faultChunks, store.Unreachable, false},
		"500":                             {status(500), faultChunks, store.Unreachable, false},
		"503":                             {status(503, "Retry-After", "soon"), faultChunks, store.Unreachable, false},
		"a length over the maximum":       {header(4, 1<<32-1), 1, store.Corrupt, false},
		"a plain length over the maximum": {header(8, chunk.MaxSize+1), 1, store.Corrupt, false},
		"an unknown codec":                {header(0, 1|7<<16), 1, store.Corrupt, false},
		"a larger plain length": {func(x *exchange, v chunk.Digest) {
			x.victim(v, func(f *api.Frame) { f.Len, f.Codec = f.Len+1, pack.Zstd })
		}, 1, store.Corrupt, false},
		"a bomb":                {stored(big, pack.Zstd, 1<<20), 1, store.Corrupt, false},
		"a bomb of the largest": {stored(big, pack.Zstd, chunk.MaxSize), 1, store.Corrupt, false},
		"zstd that is none":     {stored(garbage, pack.Zstd, 1000), 1, store.Corrupt, false},
		"another chunk's bytes": {func(x *exchange, v chunk.Digest) {
			x.victim(v, func(f *api.Frame) {
				other := frameOf([]byte("another chunk"))
				other.Digest = v
				*f = other
			})
		}, 1, store.Corrupt, false},
		"right length, wrong bytes": {func(x *exchange, v chunk.Digest) {
			x.victim(v, func(f *api.Frame) {
				b := bytes.Repeat([]byte{7}, int(f.Len))
				f.Codec, f.Stored, f.CRC = pack.Raw, b, pack.Checksum(b)
			})
		}, 1, store.Corrupt, false},
		"a wrong checksum": {func(x *exchange, v chunk.Digest) { x.victim(v, func(f *api.Frame) { f.CRC ^= 1 }) }, 1, store.Corrupt, false},
		"not found":        {says(api.StatusNotFound), 1, store.Missing, true},
		"damaged":          {says(api.StatusCorrupt), 1, store.Corrupt, true},
		"not now":          {says(api.StatusError), 1, store.Unreachable, false},
		"a trailer that lies": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Trailer", api.HeaderBucketBytes)
			x.send(200, all(x))
			x.w.Header().Set(api.HeaderBucketBytes, "18446744073709551615")
		}, 0, "", false},
		"a trailer without end": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Trailer", "X")
			x.send(200, all(x))
			x.w.Header().Set("X", strings.Repeat("x", 1<<20))
		}, 0, "", false},
	}
}

// silences are the faults that only the end of the client's patience shows.
func silences() map[string]fault {
	return map[string]fault{
		"slow loris": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Content-Type", api.TypeFrames)
			for _, b := range x.body(x.frames...) {
				x.w.Write([]byte{b})
				http.NewResponseController(x.w).Flush()
				select {
				case <-time.After(10 * time.Millisecond):
				case <-x.r.Context().Done():
					return
				}
			}
		}, faultChunks, store.Unreachable, false},
		"silence before the headers": {func(x *exchange, _ chunk.Digest) { <-x.r.Context().Done() }, faultChunks, store.Unreachable, false},
		"silence before the victim": {func(x *exchange, v chunk.Digest) {
			x.w.Header().Set("Content-Type", api.TypeFrames)
			fw := api.NewFrameWriter(x.w)
			for _, f := range x.frames {
				if f.Digest != v && fw.Write(f) != nil {
					return
				}
			}
			stall(x.w, x.r)
		}, 1, store.Unreachable, false},
		"silence before the end": {func(x *exchange, _ chunk.Digest) {
			x.w.Header().Set("Content-Type", api.TypeFrames)
			b := x.body(x.frames...)
			x.w.Write(b[:len(b)-48])
			stall(x.w, x.r)
		}, 0, "", false},
	}
}

// faultLab is a real store and its chunks.
type faultLab struct {
	world  *apitest.World
	honest http.Handler
	chunks map[chunk.Digest][]byte
	ds     []chunk.Digest // the victim last
}

func newFaultLab(t *testing.T) *faultLab {
	l := &faultLab{world: apitest.New(t), chunks: map[chunk.Digest][]byte{}}
	for i := range faultChunks {
		p := bytes.Repeat(fmt.Appendf(nil, "chunk %d ", i), 300+i)
		d := l.world.PutChunk(t, p)
		l.chunks[d] = p
		l.ds = append(l.ds, d)
	}
	l.honest = api.NewHandler(api.Config{Chunks: l.world.Chunks, Names: l.world.Catalog, Bucket: l.world.Bucket})
	return l
}

func (l *faultLab) victim() chunk.Digest { return l.ds[faultChunks-1] }

// node is a server in front of the store whose first answers have a fault.
type node struct {
	client *client.Client
	asked  atomic.Int64
	strays atomic.Int64 // requests that are no batchGet
}

func (l *faultLab) node(t *testing.T, f fault, faulty int64, patience time.Duration) *node {
	n := &node{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/chunks:batchGet" {
			n.strays.Add(1)
			return
		}
		if n.asked.Add(1) > faulty {
			l.honest.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		l.honest.ServeHTTP(rec, r)
		x := &exchange{w: w, r: r}
		fr := api.NewFrameReader(rec.Body, faultChunks)
		for {
			f, err := fr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Errorf("honest answer: %v", err)
				return
			}
			f.Stored = bytes.Clone(f.Stored)
			x.frames = append(x.frames, f)
		}
		v := l.victim()
		slices.SortStableFunc(x.frames, func(a, b api.Frame) int {
			return bytes.Compare([]byte(strconv.FormatBool(a.Digest == v)), []byte(strconv.FormatBool(b.Digest == v)))
		})
		f.serve(x, v)
	}))
	t.Cleanup(srv.Close)
	n.client = connect(t, client.Config{URL: srv.URL, IdleTimeout: patience})
	return n
}

// read reads the batch from stores and returns how many chunks have an error.
func (l *faultLab) read(t *testing.T, s *client.Stores, outcome store.Outcome) (failed int, err error) {
	t.Helper()
	answers := map[chunk.Digest]int{}
	err = s.GetBatch(t.Context(), l.ds, func(d chunk.Digest, p []byte, err error) error {
		answers[d]++
		switch {
		case err == nil && !bytes.Equal(p, l.chunks[d]):
			t.Errorf("WRONG BYTES: %d for %s", len(p), d)
		case err != nil:
			failed++
			if got := store.OutcomeOf(err); got != outcome {
				t.Errorf("chunk: got outcome %q, want %q: %v", got, outcome, err)
			}
			for _, st := range s.Stats().Stores {
				if !strings.Contains(err.Error(), st.Store) {
					t.Errorf("the error does not tell what %s said: %v", st.Store, err)
				}
			}
			if !errors.As(err, new(*client.StoreError)) {
				t.Errorf("no StoreError: %v", err)
			}
		}
		return nil
	})
	for d, n := range answers {
		if n != 1 {
			t.Errorf("chunk %s was answered %d times", d, n)
		}
	}
	if err == nil && len(answers) != faultChunks {
		t.Errorf("%d answers, want %d", len(answers), faultChunks)
	}
	return failed, err
}

const always = 1 << 40

func TestEveryFaultEndsInRightBytesOrATypedError(t *testing.T) {
	l := newFaultLab(t)
	for name, f := range faults(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l.suffer(t, f, time.Minute) // a busy machine is not silence
		})
	}
	for name, f := range silences() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l.suffer(t, f, 500*time.Millisecond)
		})
	}
}

// suffer reads from stores with a fault, alone and beside good ones.
func (l *faultLab) suffer(t *testing.T, f fault, patience time.Duration) {
	serve := func(faulty int64) *node { return l.node(t, f, faulty, patience) }
	stores := func(hedge time.Duration, nodes ...*node) *client.Stores {
		cfg := client.StoresConfig{Backoff: time.Millisecond, HedgeAfter: hedge, AttemptTimeout: patience, Attempts: 4 / len(nodes)}
		for _, n := range nodes {
			cfg.Clients = append(cfg.Clients, n.client)
		}
		return client.NewStores(cfg)
	}
	want := func(t *testing.T, s *client.Stores, fails int, outcome store.Outcome) {
		t.Helper()
		failed, err := l.read(t, s, outcome)
		if err != nil || (failed != fails && fails >= 0) || (failed == 0 && fails == some) {
			t.Errorf("%d chunks failed, error %v, want %d", failed, err, fails)
		}
		if got := s.Stats().BucketBytes; got > 1<<20 {
			t.Errorf("a lie about the bucket was counted: %d", got)
		}
	}
	one := serve(always)
	t.Run("at the only store", func(t *testing.T) { want(t, stores(-1, one), f.fails, f.outcome) })
	if n := one.asked.Load(); (f.settled && n != 1) || n > 4*faultChunks {
		t.Errorf("the store was asked %d times", n)
	}
	if n := one.strays.Load(); n > 0 {
		t.Errorf("%d requests went elsewhere", n)
	}
	t.Run("once", func(t *testing.T) {
		fails, outcome := 0, store.Outcome("")
		if f.settled {
			fails, outcome = f.fails, f.outcome
		}
		want(t, stores(-1, serve(1)), fails, outcome)
	})
	t.Run("at the first of two", func(t *testing.T) {
		want(t, stores(0, serve(always), serve(0)), 0, "")
	})
	t.Run("at the first of two, hedged", func(t *testing.T) {
		want(t, stores(20*time.Millisecond, serve(always), serve(0)), 0, "")
	})
	t.Run("at both", func(t *testing.T) {
		fails := f.fails
		if fails == some {
			fails = perhaps // each answer brings some chunks, and there are twice as many
		}
		want(t, stores(-1, serve(always), serve(always)), fails, f.outcome)
	})
}
