package client_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/klauspost/compress/zstd"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

// start calls Start for a published image with image.Verify, and counts its calls.
type start struct {
	w     *apitest.World
	img   *apitest.Image
	have  *chunk.Digest
	calls int
	id    chunk.Digest // that verify proved last
}

func (s *start) verify(name, statement []byte) (*image.Verified, error) {
	s.calls++
	v, err := image.Verify(statement, name, image.Want{
		Ref: s.img.Ref, Platform: s.img.Platform, Trust: signer.NewTrust(s.w.Key.Public()),
	})
	if err == nil {
		s.id = v.ID
	}
	return v, err
}

func (s *start) ask(t *testing.T, c *client.Client) (config, boot []byte, err error) {
	t.Helper()
	config, boot, _, err = c.Start(t.Context(), s.img.Ref, s.img.Platform, s.have, false, s.verify)
	return config, boot, err
}

func TestAStartIsOneRequest(t *testing.T) {
	w := apitest.New(t)
	s := &start{w: w, img: w.Publish(t, "team/python:3.13", 300, 1)}
	srv, _ := w.Serve(t, nil)
	c := connect(t, client.Config{URL: srv.URL})
	config, boot, err := s.ask(t, c)
	if err != nil || !bytes.Equal(config, s.img.Config) || !bytes.Equal(boot, s.img.Bootstrap) {
		t.Errorf("config %q, bootstrap of %d bytes, error %v", config, len(boot), err)
	}
	if got := c.Stats(); got.Requests != 1 || s.calls != 1 || got.BytesIn >= uint64(len(boot)) {
		t.Errorf("%+v and %d calls of verify, want 1 each and fewer bytes than the bootstrap's %d", got, s.calls, len(boot))
	}
	before := c.Stats()
	s.have = &s.id
	config, boot, err = s.ask(t, c)
	if err != nil || config != nil || boot != nil {
		t.Errorf("image that is here: config %q, bootstrap of %d bytes, error %v", config, len(boot), err)
	}
	if got := c.Stats(); got.Requests-before.Requests != 1 || got.BytesIn-before.BytesIn > 4096 {
		t.Errorf("image that is here: %+v after %+v", got, before)
	}
	s.img.Ref = image.Ref{Repo: s.img.Ref.Repo, Digest: &s.img.Source}
	s.have = nil
	if _, boot, err := s.ask(t, c); err != nil || !bytes.Equal(boot, s.img.Bootstrap) {
		t.Errorf("by digest: bootstrap of %d bytes, error %v", len(boot), err)
	}
}

func TestAStartThatVerifyRefusesReadsNoMore(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	stream := recorded(t, w, "a:b")
	var parts []byte // up to the header of the config
	for _, p := range partsOf(t, stream)[:2] {
		parts = append(parts, p.payload...)
	}
	c := lie(t, func(rw http.ResponseWriter, r *http.Request) {
		rw.Write(stream[:12+2*12+len(parts)])
		stall(rw, r)
	})
	mine := errors.New("mine")
	calls := 0
	_, _, _, err := c.Start(t.Context(), img.Ref, img.Platform, nil, false, func(_, _ []byte) (*image.Verified, error) {
		calls++
		return nil, mine
	})
	if !errors.Is(err, mine) || calls != 1 || c.Stats().Requests != 1 {
		t.Errorf("got error %v after %d calls and %+v", err, calls, c.Stats())
	}
	var e *api.Error
	unknown := image.Ref{Repo: "a", Tag: "c"}
	srv, _ := w.Serve(t, nil)
	_, _, _, err = connect(t, client.Config{URL: srv.URL}).Start(t.Context(), unknown, img.Platform, nil, false, nil)
	if !errors.Is(err, api.ErrTagUnknown) || !errors.As(err, &e) || !slices.Equal(e.Details["tags"], []string{"b"}) {
		t.Errorf("unknown tag: got error %v", err)
	}
}

// recorded returns the stream that an honest server sends.
func recorded(t *testing.T, w *apitest.World, ref string) []byte {
	t.Helper()
	rec := httptest.NewRecorder()
	api.NewHandler(api.Config{Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket}).
		ServeHTTP(rec, httptest.NewRequest("GET", "/v1/start/"+ref, nil))
	if rec.Code != 200 {
		t.Fatalf("status %d: %s", rec.Code, rec.Body)
	}
	return rec.Body.Bytes()
}

// sentPart is a part of a stream with its payload as sent.
type sentPart struct {
	api.StartPart
	payload []byte
}

func partsOf(t *testing.T, stream []byte) []sentPart {
	t.Helper()
	sr := api.NewStartReader(bytes.NewReader(stream))
	var parts []sentPart
	for {
		p, err := sr.Next()
		if err == io.EOF {
			return parts
		}
		if err != nil {
			t.Fatal(err)
		}
		payload, err := io.ReadAll(sr)
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, sentPart{p, payload})
	}
}

// streamOf writes parts and the end; the last part may be cut short.
func streamOf(t *testing.T, parts ...sentPart) []byte {
	t.Helper()
	var b bytes.Buffer
	sw := api.NewStartWriter(&b)
	for _, p := range parts {
		if err := sw.Begin(p.StartPart); err != nil {
			t.Fatal(err)
		}
		if _, err := sw.Write(p.payload); err != nil {
			t.Fatal(err)
		}
	}
	if err := sw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func (p sentPart) with(payload []byte) sentPart {
	p.payload, p.Codec, p.Size, p.Plain = payload, pack.Raw, int64(len(payload)), int64(len(payload))
	return p
}

func TestALyingStartIsFoundOut(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 20, 1)
	w.Publish(t, "a:c", 20, 2)
	honest := recorded(t, w, "a:b")
	p, q := partsOf(t, honest), partsOf(t, recorded(t, w, "a:c"))
	name, envelope, config, boot := p[0], p[1], p[2], p[3]
	zipped := func(plain int64, stored []byte) sentPart {
		b := boot.with(stored)
		b.Codec, b.Plain = pack.Zstd, plain
		return b
	}
	id := chunk.Sum(nil)
	for what, c := range map[string]struct {
		stream []byte
		have   *chunk.Digest
	}{
		"no name statement":            {stream: streamOf(t, envelope, config, boot)},
		"another image's name":         {stream: streamOf(t, q[0], envelope, config, boot)},
		"another image's statement":    {stream: streamOf(t, name, q[1], config, boot)},
		"another image":                {stream: streamOf(t, q...)},
		"another image's config":       {stream: streamOf(t, name, envelope, q[2], boot)},
		"another image's bootstrap":    {stream: streamOf(t, name, envelope, config, q[3])},
		"a flipped byte":               {stream: streamOf(t, name, envelope, config, boot.with(flipped(img.Bootstrap)))},
		"a shorter bootstrap":          {stream: streamOf(t, name, envelope, config, boot.with(img.Bootstrap[1:]))},
		"a longer bootstrap":           {stream: streamOf(t, name, envelope, config, boot.with(append(bytes.Clone(img.Bootstrap), 0)))},
		"a bootstrap of 1 GiB":         {stream: streamOf(t, name, envelope, config, zipped(1<<30, bomb(t, 1<<20)))},
		"a bomb":                       {stream: streamOf(t, name, envelope, config, zipped(int64(len(img.Bootstrap)), bomb(t, 64<<20)[:1<<10]))},
		"a large window":               {stream: streamOf(t, name, envelope, config, zipped(int64(len(img.Bootstrap)), bomb(t, 32<<20, zstd.WithWindowSize(32<<20))[:1<<9]))},
		"content left out":             {stream: streamOf(t, name, envelope)},
		"content left out, other have": {stream: streamOf(t, name, envelope), have: &id},
		"a stream without its end":     {stream: honest[:len(honest)-12]},
		"a byte after the end":         {stream: append(bytes.Clone(honest), 0)},
		"an HTML page":                 {stream: []byte("<html><body>It works!</body></html>")},
		"nothing":                      {},
	} {
		t.Run(what, func(t *testing.T) {
			s := &start{w: w, img: img, have: c.have}
			cl := lie(t, func(rw http.ResponseWriter, _ *http.Request) { rw.Write(c.stream) })
			before := allocated()
			if config, boot, err := s.ask(t, cl); err == nil || config != nil || boot != nil {
				t.Errorf("the lie was taken for config %q and a bootstrap of %d bytes", config, len(boot))
			}
			if n := allocated() - before; n > 64<<20 {
				t.Errorf("the client allocated %d bytes", n)
			}
			if n := cl.Stats().Requests; n > 3 {
				t.Errorf("%d attempts, at most 3 are allowed", n)
			}
			if s.calls > 1 {
				t.Errorf("verify was called %d times with the same envelopes", s.calls)
			}
		})
	}
	known := &start{w: w, img: img}
	if _, err := known.verify(name.payload, envelope.payload); err != nil {
		t.Fatal(err)
	}
	known.have = &known.id
	c := lie(t, func(rw http.ResponseWriter, _ *http.Request) { rw.Write(honest) })
	if _, _, err := known.ask(t, c); err == nil {
		t.Error("content of an image that is here was taken")
	}
}

func flipped(p []byte) []byte {
	p = bytes.Clone(p)
	p[len(p)/2] ^= 1
	return p
}

func TestAStartThatBreaksOffIsAskedForAgain(t *testing.T) {
	w := apitest.New(t)
	s := &start{w: w, img: w.Publish(t, "a:b", 20, 1)}
	stream := recorded(t, w, "a:b")
	for _, cut := range []int{0, 5, 20, 100, len(stream) / 2, len(stream) - 12, len(stream) - 1} {
		for _, stalls := range []bool{false, true} {
			var mu sync.Mutex // guards asked
			asked := 0
			synctest.Test(t, func(t *testing.T) {
				c := inMemory(t, "breaks", func(rw http.ResponseWriter, r *http.Request) {
					mu.Lock()
					asked++
					first := asked == 1
					mu.Unlock()
					if !first {
						rw.Write(stream)
						return
					}
					rw.Write(stream[:cut])
					if stalls {
						stall(rw, r)
					}
				})
				s.calls = 0
				_, boot, err := s.ask(t, c)
				if err != nil || !bytes.Equal(boot, s.img.Bootstrap) || s.calls != 1 || c.Stats().Requests != 2 {
					t.Errorf("cut at %d: bootstrap of %d bytes, error %v, %d calls of verify, %+v", cut, len(boot), err, s.calls, c.Stats())
				}
			})
		}
	}
}

func TestANameThatMovesWhileAStartBreaksOffIsTheNewImage(t *testing.T) {
	w := apitest.New(t)
	first := w.Publish(t, "a:b", 20, 1)
	streams := [][]byte{recorded(t, w, "a:b")}
	second := w.Publish(t, "a:b", 20, 2)
	streams = append(streams, recorded(t, w, "a:b"))
	for _, tt := range []struct {
		order []int
		want  *apitest.Image
	}{{[]int{0, 1}, second}, {[]int{1, 0}, nil}} {
		n := 0
		c := lie(t, func(rw http.ResponseWriter, _ *http.Request) {
			b := streams[tt.order[min(n, 1)]]
			if n++; n == 1 {
				b = b[:len(b)-1]
			}
			rw.Write(b)
		})
		seen := image.Seen{}
		config, boot, _, err := c.Start(t.Context(), first.Ref, first.Platform, nil, false, func(name, st []byte) (*image.Verified, error) {
			v, err := image.Verify(st, name, image.Want{
				Ref: first.Ref, Platform: first.Platform, Trust: signer.NewTrust(w.Key.Public()), Seen: seen, Now: time.Now(),
			})
			if err == nil {
				seen = image.Seen{Serial: v.Name.Serial, Source: v.Name.Source}
			}
			return v, err
		})
		switch {
		case tt.want == nil && !errors.Is(err, image.ErrRollback):
			t.Errorf("an older name on the second attempt: got config %q, error %v, want ErrRollback", config, err)
		case tt.want != nil && (err != nil || !bytes.Equal(boot, tt.want.Bootstrap) || !bytes.Equal(config, tt.want.Config)):
			t.Errorf("a newer name on the second attempt: got config %q, error %v", config, err)
		}
		if seen.Serial != 2 {
			t.Errorf("serial %d was remembered, want 2", seen.Serial)
		}
	}
}
