package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"quarry/api"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// The coders of package pack are made at their first use, which must not be in a
// bubble: all tests share them.
var _ = func() bool {
	f := frameOf(make([]byte, 1000))
	_, err := pack.Decode(nil, f.Codec, f.Stored, f.Len)
	return err == nil
}()

// pipes is a network of one server in memory, for tests whose time is made up.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (l *pipes) dial(context.Context, string, string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// inMemory serves h in memory until the test's bubble ends.
func inMemory(t *testing.T, name string, h http.HandlerFunc) *client.Client {
	t.Helper()
	l := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	var running sync.WaitGroup
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		running.Add(1)
		defer running.Done()
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", api.TypeFrames)
		h(w, r)
	})}
	go srv.Serve(l) // ends with Close
	c, err := client.New(client.Config{URL: "http://" + name, Dial: l.dial})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		srv.Close()
		synctest.Wait() // what still begins has begun
		running.Wait()
	})
	return c
}

// honest answers with p.
func honest(p []byte, asked *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		answer(w, frameOf(p))
	}
}

func TestRetryAfterIsObeyedWhereThereIsNoOtherStore(t *testing.T) {
	p := []byte("chunk")
	for retryAfter, want := range map[string]time.Duration{"3": 3 * time.Second, "4000000": 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var asked, other atomic.Int64
			busy := func(w http.ResponseWriter, r *http.Request) {
				if asked.Add(1) > 1 {
					answer(w, frameOf(p))
					return
				}
				w.Header().Set("Retry-After", retryAfter)
				w.WriteHeader(503)
			}
			c := inMemory(t, "a", busy)
			s := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}})
			start := time.Now()
			if _, err := s.Get(t.Context(), chunk.Sum(p), nil); err != nil {
				t.Fatal(err)
			}
			if waited := time.Since(start); waited < want || waited > want+time.Second {
				t.Errorf("Retry-After: %s: asked again after %v, want %v", retryAfter, waited, want)
			}
			asked.Store(0)
			s = client.NewStores(client.StoresConfig{Clients: []*client.Client{c, inMemory(t, "b", honest(p, &other))}})
			start = time.Now()
			if _, err := s.Get(t.Context(), chunk.Sum(p), nil); err != nil || time.Since(start) > 0 || other.Load() != 1 {
				t.Errorf("with another store: error %v after %v, %d requests there", err, time.Since(start), other.Load())
			}
		})
	}
}

func TestAStoreThatFailsIsAskedLastAndProbedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := []byte("chunk")
		var a, b atomic.Int64
		var down atomic.Bool
		down.Store(true)
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{
			inMemory(t, "a", func(w http.ResponseWriter, r *http.Request) {
				if a.Add(1); down.Load() {
					w.WriteHeader(500)
					return
				}
				answer(w, frameOf(p))
			}),
			inMemory(t, "b", honest(p, &b)),
		}})
		get := func(wantA, wantB int64) {
			t.Helper()
			a.Store(0)
			b.Store(0)
			if got, err := s.Get(t.Context(), chunk.Sum(p), nil); err != nil || !bytes.Equal(got, p) {
				t.Fatalf("got %q, error %v", got, err)
			}
			if a.Load() != wantA || b.Load() != wantB {
				t.Errorf("%d and %d requests, want %d and %d", a.Load(), b.Load(), wantA, wantB)
			}
		}
		get(1, 1)
		get(0, 1)
		time.Sleep(2 * time.Second)
		get(1, 1) // the probe
		get(0, 1)
		time.Sleep(time.Minute) // longer than any
		get(1, 1)
		down.Store(false)
		get(0, 1) // nobody has looked yet
		time.Sleep(time.Minute)
		get(1, 0)
		get(1, 0)
		if st := s.Stats().Stores; st[0].Failed != 3 || st[0].Avoided || st[1].Failed != 0 {
			t.Errorf("stores %+v", st)
		}
	})
}

// A store that is slow for all requests gets a few more of them, not twice as
// many.
func TestHedgesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := []byte("chunk")
		var asked atomic.Int64
		c := inMemory(t, "slow", func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			select {
			case <-time.After(4 * time.Second):
				answer(w, frameOf(p))
			case <-r.Context().Done():
			}
		})
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}})
		const requests = 200
		var wg sync.WaitGroup
		for range requests / 20 {
			for range 20 {
				wg.Go(func() {
					if got, err := s.Get(t.Context(), chunk.Sum(p), nil); err != nil || !bytes.Equal(got, p) {
						t.Errorf("got %q, error %v", got, err)
					}
				})
			}
			wg.Wait()
		}
		hedges := s.Stats().Hedges
		if most := uint64(8 + requests/20); hedges == 0 || hedges > most || asked.Load() != int64(requests+hedges) || s.Stats().Again != hedges {
			t.Errorf("%d hedges and %d requests for %d, want at most %d hedges", hedges, asked.Load(), requests, most)
		}
	})
}

func TestADeadlineHasTheOutcomeOfWhatWasSeen(t *testing.T) {
	p := []byte("chunk")
	bad := frameOf(p)
	bad.CRC ^= 1
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	lies := func(w http.ResponseWriter, _ *http.Request) { answer(w, bad) }
	none := func(w http.ResponseWriter, _ *http.Request) {
		answer(w, api.Frame{Digest: bad.Digest, Status: api.StatusNotFound})
	}
	drips := func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := w.Write([]byte("Q")); err != nil {
				return
			}
			http.NewResponseController(w).Flush()
			time.Sleep(time.Second)
		}
	}
	for name, tt := range map[string]struct {
		stores []http.HandlerFunc
		want   store.Outcome
	}{
		"silent":              {[]http.HandlerFunc{silent}, store.Unreachable},
		"drips":               {[]http.HandlerFunc{drips}, store.Unreachable},
		"lies, silent":        {[]http.HandlerFunc{lies, silent}, store.Corrupt},
		"silent, lies":        {[]http.HandlerFunc{silent, lies}, store.Corrupt},
		"has it not, silent":  {[]http.HandlerFunc{none, silent}, store.Unreachable}, // the second may have it
		"silent, has it not":  {[]http.HandlerFunc{silent, none}, store.Unreachable},
		"has it not, drips":   {[]http.HandlerFunc{none, drips}, store.Unreachable},
		"lies and has it not": {[]http.HandlerFunc{lies, none}, store.Corrupt},
		"neither has it":      {[]http.HandlerFunc{none, none}, store.Missing},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var cfg client.StoresConfig
				for i, h := range tt.stores {
					cfg.Clients = append(cfg.Clients, inMemory(t, fmt.Sprint("s", i), h))
				}
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				got, err := client.NewStores(cfg).Get(ctx, bad.Digest, nil)
				if got != nil || store.OutcomeOf(err) != tt.want {
					t.Errorf("got %d bytes, outcome %q of error %v, want %q", len(got), store.OutcomeOf(err), err, tt.want)
				}
			})
		})
	}
}

func TestACallerThatLeavesIsNoOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, "a", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		_, err := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}}).Get(ctx, chunk.Sum(nil), nil)
		if !errors.Is(err, context.Canceled) || store.OutcomeOf(err) != "" {
			t.Errorf("got error %v of outcome %q", err, store.OutcomeOf(err))
		}
	})
}

// A hedge asks for the open chunks only, and what the first request brings late
// counts too.
func TestAHedgeAsksForWhatIsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := []byte("chunk a"), []byte("chunk b")
		release := make(chan struct{})
		first := inMemory(t, "first", func(w http.ResponseWriter, _ *http.Request) {
			fw := api.NewFrameWriter(w)
			if fw.Write(frameOf(a)) != nil {
				return
			}
			http.NewResponseController(w).Flush()
			<-release
			_ = fw.Write(frameOf(b)) // the client may be gone
			_ = fw.Close()
		})
		var asked []int64
		second := inMemory(t, "second", func(w http.ResponseWriter, r *http.Request) {
			asked = append(asked, r.ContentLength/32)
			close(release)
			stall(w, r)
		})
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{first, second}})
		got := 0
		err := s.GetBatch(t.Context(), []chunk.Digest{chunk.Sum(a), chunk.Sum(b)}, func(_ chunk.Digest, _ []byte, err error) error {
			got++
			return err
		})
		if st := s.Stats(); err != nil || got != 2 || st.Hedges != 1 || st.HedgesWon != 0 || st.Again != 1 || !slices.Equal(asked, []int64{1}) {
			t.Errorf("%d chunks, error %v, %+v, hedge for %v chunks", got, err, st, asked)
		}
	})
}

// A store that hangs does not say so; one that is overtaken again and again is
// asked after the others all the same.
func TestAStoreThatHangsIsAskedLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := []byte("chunk")
		var hung, good atomic.Int64
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{
			inMemory(t, "hangs", func(w http.ResponseWriter, r *http.Request) {
				hung.Add(1)
				<-r.Context().Done()
			}),
			inMemory(t, "good", honest(p, &good)),
		}})
		for range 20 {
			if _, err := s.Get(t.Context(), chunk.Sum(p), nil); err != nil {
				t.Fatal(err)
			}
		}
		if st := s.Stats(); hung.Load() != 3 || good.Load() != 20 || st.Hedges != 3 || !st.Stores[0].Avoided {
			t.Errorf("%d and %d requests, want 3 and 20: %+v", hung.Load(), good.Load(), st)
		}
	})
}

// What comes slowly, but comes, is no reason for a second request.
func TestASlowStreamIsNotHedged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := make([]byte, 4<<20)
		rand.NewChaCha8([32]byte{}).Read(large)
		slow := func(w http.ResponseWriter, r *http.Request) {
			rec := httptest.NewRecorder()
			answer(rec, frameOf(large))
			for part := range slices.Chunk(rec.Body.Bytes(), 32<<10) {
				if _, err := w.Write(part); err != nil {
					return
				}
				time.Sleep(150 * time.Millisecond) // all of it takes 20 s
			}
		}
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{inMemory(t, "slow", slow), inMemory(t, "other", slow)}})
		got, err := s.Get(t.Context(), chunk.Sum(large), nil)
		if st := s.Stats(); err != nil || !bytes.Equal(got, large) || st.Requests != 1 {
			t.Errorf("%d bytes, error %v, %+v", len(got), err, st)
		}
	})
}

// A caller that is slow to take a chunk is no stall of the store.
func TestASlowCallerIsNotHedged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := []byte("chunk a"), []byte("chunk b")
		c := inMemory(t, "good", func(w http.ResponseWriter, _ *http.Request) { answer(w, frameOf(a), frameOf(b)) })
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}})
		err := s.GetBatch(t.Context(), []chunk.Digest{chunk.Sum(a), chunk.Sum(b)}, func(_ chunk.Digest, _ []byte, err error) error {
			time.Sleep(time.Hour)
			return err
		})
		if st := s.Stats(); err != nil || st.Requests != 1 || st.Hedges != 0 {
			t.Errorf("error %v, %+v", err, st)
		}
	})
}

// A store node that is restarted costs time and no read; one that stays away
// costs that time once.
func TestAnOutageIsWaitedForOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := []byte("chunk")
		var down atomic.Bool
		var good atomic.Int64
		serve := honest(p, &good)
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{
			inMemory(t, "a", func(w http.ResponseWriter, r *http.Request) {
				if down.Load() {
					panic(http.ErrAbortHandler)
				}
				serve(w, r)
			}),
		}})
		get := func() (time.Duration, error) {
			start := time.Now()
			_, err := s.Get(t.Context(), chunk.Sum(p), nil)
			return time.Since(start), err
		}
		if _, err := get(); err != nil {
			t.Fatal(err)
		}
		down.Store(true)
		time.AfterFunc(8*time.Second, func() { down.Store(false) })
		if took, err := get(); err != nil || took < 8*time.Second {
			t.Errorf("restarted: error %v after %v", err, took)
		}
		down.Store(true)
		if took, err := get(); store.OutcomeOf(err) != store.Unreachable || took < 8*time.Second || took > 15*time.Second {
			t.Errorf("gone: error %v after %v", err, took)
		}
		if took, err := get(); store.OutcomeOf(err) != store.Unreachable || took > 2*time.Second {
			t.Errorf("still gone: error %v after %v", err, took)
		}
	})
}

// A request whose chunks others have brought is given up at once, though the
// batch waits for more.
func TestALoserIsCancelledBeforeTheBatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := []byte("chunk a"), []byte("chunk b")
		start := time.Now()
		left := make(chan time.Duration)
		first := inMemory(t, "first", func(w http.ResponseWriter, r *http.Request) {
			if api.NewFrameWriter(w).Write(api.Frame{Digest: chunk.Sum(b), Status: api.StatusNotFound}) != nil {
				return
			}
			stall(w, r) // and a does not come
			left <- time.Since(start)
		})
		var asked atomic.Int64
		second := inMemory(t, "second", func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1) == 2 { // the hedge
				answer(w, frameOf(a))
				return
			}
			if waited := <-left; waited > time.Second {
				t.Errorf("the first store was left alone after %v", waited)
			}
			answer(w, frameOf(b))
		})
		s := client.NewStores(client.StoresConfig{Clients: []*client.Client{first, second}})
		got := 0
		err := s.GetBatch(t.Context(), []chunk.Digest{chunk.Sum(a), chunk.Sum(b)}, func(_ chunk.Digest, _ []byte, err error) error {
			got++
			return err
		})
		if err != nil || got != 2 || asked.Load() != 2 {
			t.Errorf("%d chunks in %d requests, error %v", got, asked.Load(), err)
		}
	})
}
