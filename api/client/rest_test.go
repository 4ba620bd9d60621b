package client_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store/chunk"
	"quarry/store/trace"
)

// tracedWorld has one image that two runs agree on.
func tracedWorld(t *testing.T) (*start, string) {
	t.Helper()
	w := apitest.New(t)
	s := &start{w: w, img: w.Publish(t, "a:b", 40, 1)}
	srv, _ := w.Serve(t, nil)
	c := connect(t, client.Config{URL: srv.URL})
	for range 2 {
		if err := c.SendTrace(t.Context(), w.ID(t, s.img), w.Record(t, s.img, 5, 3, 9)); err != nil {
			t.Fatal(err)
		}
	}
	return s, srv.URL
}

// askRest is ask with the rest of the answer.
func (s *start) askRest(t *testing.T, ctx context.Context, c *client.Client) io.ReadCloser {
	t.Helper()
	config, boot, rest, err := c.Start(ctx, s.img.Ref, s.img.Platform, s.have, true, s.verify)
	if err != nil {
		t.Fatal(err)
	}
	if s.have == nil && (!bytes.Equal(config, s.img.Config) || !bytes.Equal(boot, s.img.Bootstrap)) || s.have != nil && (config != nil || boot != nil) {
		t.Errorf("config %q, bootstrap of %d bytes", config, len(boot))
	}
	return rest
}

func listed(t *testing.T, rest io.Reader) (list, chunks int, err error) {
	t.Helper()
	tr := trace.NewReader(rest)
	numbers, _, err := tr.List()
	for err == nil {
		if _, err = tr.Next(); err == nil {
			chunks++
		}
	}
	return len(numbers), chunks, err
}

func TestTheRestOfAStartIsForTheCaller(t *testing.T) {
	s, url := tracedWorld(t)
	c := connect(t, client.Config{URL: url})
	rest := s.askRest(t, t.Context(), c)
	if list, chunks, err := listed(t, rest); err != io.EOF || list != 3 || chunks != 3 {
		t.Errorf("got %d numbers, %d chunks, %v", list, chunks, err)
	}
	if r, ok := rest.(client.Rest); !ok || !r.Enough {
		t.Errorf("got a %T, %+v, want word that two runs are enough", rest, rest)
	}
	rest.Close()
	id := s.id
	s.have = &id
	rest = s.askRest(t, t.Context(), c)
	if list, chunks, err := listed(t, rest); err != io.EOF || list != 3 || chunks != 0 {
		t.Errorf("image that is here: got %d numbers, %d chunks, %v", list, chunks, err)
	}
	rest.Close()
	if got := c.Stats().Requests; got != 2 {
		t.Errorf("%d requests for two starts", got)
	}
	other := chunk.Sum([]byte("other"))
	if err := c.SendTrace(t.Context(), other, s.w.Record(t, s.img, 1)); !errors.Is(err, api.ErrBadTrace) {
		t.Errorf("a record of another image: %v", err)
	}
}

// The rest breaks off wherever it likes: the image is here.
func TestARestThatBreaksOffIsNoErrorOfTheStart(t *testing.T) {
	s, url := tracedWorld(t)
	c := connect(t, client.Config{URL: url})
	var b bytes.Buffer
	rq, err := http.NewRequestWithContext(t.Context(), "GET", url+"/v1/start/a:b", nil)
	if err != nil {
		t.Fatal(err)
	}
	rq.Header.Set("Accept", api.TypeStart2)
	resp, err := http.DefaultClient.Do(rq)
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.ReadFrom(resp.Body)
	resp.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	whole := b.Bytes()
	rest := s.askRest(t, t.Context(), c)
	tail, err := io.ReadAll(rest)
	rest.Close()
	if err != nil || !bytes.HasSuffix(whole, tail) {
		t.Fatalf("rest of %d bytes, %v", len(tail), err)
	}
	for _, left := range []int{len(tail), len(tail) - 5, 1} {
		for _, stalls := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				liar := inMemory(t, "liar", func(rw http.ResponseWriter, r *http.Request) {
					rw.Write(whole[:len(whole)-left])
					if stalls {
						stall(rw, r)
					}
				})
				rest := s.askRest(t, t.Context(), liar)
				if _, _, err := listed(t, rest); err == nil || err == io.EOF {
					t.Errorf("%d bytes before the end, stalls %t: %v", left, stalls, err)
				}
				rest.Close()
				if n := liar.Stats().Requests; n != 1 {
					t.Errorf("%d requests", n)
				}
			})
		}
	}
}

func TestARestEndsWithItsContext(t *testing.T) {
	s, _ := tracedWorld(t)
	var stream bytes.Buffer
	sw := api.NewStartWriter2(&stream)
	for _, p := range partsOf(t, recorded(t, s.w, "a:b")) {
		if err := sw.Begin(p.StartPart); err != nil {
			t.Fatal(err)
		}
		if _, err := sw.Write(p.payload); err != nil {
			t.Fatal(err)
		}
	}
	c := lie(t, func(rw http.ResponseWriter, r *http.Request) {
		rw.Write(stream.Bytes())
		stall(rw, r)
	})
	ctx, cancel := context.WithCancel(t.Context())
	rest := s.askRest(t, ctx, c)
	time.AfterFunc(time.Millisecond, cancel)
	if _, err := io.ReadAll(rest); err == nil {
		t.Error("the rest ended well")
	}
	rest.Close()
}

// A server of version 1 does not look at Accept, and one that answers with what was
// not asked for is none.
func TestVersionsOfStartAreTheOnesAskedFor(t *testing.T) {
	s, _ := tracedWorld(t)
	old := recorded(t, s.w, "a:b")
	c := lie(t, func(rw http.ResponseWriter, _ *http.Request) { rw.Write(old) })
	if rest := s.askRest(t, t.Context(), c); rest != nil {
		t.Error("an answer of version 1 has a rest")
	}
	newer := bytes.Clone(old)
	newer[8] = 2
	c = lie(t, func(rw http.ResponseWriter, _ *http.Request) { rw.Write(newer) })
	if _, _, err := s.ask(t, c); err == nil {
		t.Error("an answer of version 2 was taken, and 1 was asked for")
	}
}
