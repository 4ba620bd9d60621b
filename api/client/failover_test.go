package client_test

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/signer"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

// serveWorld returns a client of a server of w.
func serveWorld(t *testing.T, w *apitest.World) *client.Client {
	t.Helper()
	srv, _ := w.Serve(t, nil)
	return connect(t, client.Config{URL: srv.URL})
}

// impatient returns a client that takes little time for silence.
func impatient(t *testing.T, h http.HandlerFunc) *client.Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return connect(t, client.Config{URL: srv.URL, IdleTimeout: 200 * time.Millisecond})
}

func TestAStartGoesToTheNextStore(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 20, 1)
	good := serveWorld(t, w)
	stream := recorded(t, w, "a:b")
	empty := apitest.New(t) // has no image, or one of another key
	stranger := apitest.New(t)
	stranger.Publish(t, "a:b", 20, 1)
	damaged := apitest.New(t)
	damaged.Key = w.Key
	damaged.Publish(t, "a:b", 20, 1)
	damaged.PutObject(t, image.BootstrapKey(chunk.Sum(img.Bootstrap)), flipped(img.Bootstrap))
	unsigned := apitest.New(t)
	unsigned.Key = w.Key
	u := unsigned.Publish(t, "a:b", 20, 1)
	if err := unsigned.Bucket.Delete(t.Context(), image.SigKey(u.Source, u.Platform, w.Key.Public().ID())); err != nil {
		t.Fatal(err)
	}
	parts, other := partsOf(t, stream), partsOf(t, recorded(t, stranger, "a:b"))
	writes := func(b []byte) http.HandlerFunc {
		return func(rw http.ResponseWriter, _ *http.Request) { rw.Write(b) }
	}
	fails := func(status int) http.HandlerFunc {
		return func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(status) }
	}
	for name, tt := range map[string]struct {
		first *client.Client
		is    error // what a Start at stores that are all like this ends with
	}{
		"that does not answer":            {first: gone(t), is: store.ErrUnreachable},
		"that is silent":                  {first: impatient(t, stall), is: client.ErrSilent},
		"that answers 500":                {first: lie(t, fails(500))},
		"that refuses":                    {first: lie(t, fails(403)), is: store.ErrUnauthorised},
		"that has no such image":          {first: serveWorld(t, empty), is: api.ErrRepoUnknown},
		"whose image is not signed yet":   {first: serveWorld(t, unsigned), is: api.ErrUnsigned},
		"whose image a stranger signed":   {first: serveWorld(t, stranger), is: signer.ErrWrongKey},
		"whose bootstrap is damaged":      {first: serveWorld(t, damaged), is: api.ErrObjectCorrupt},
		"that lies about the bootstrap":   {first: lie(t, writes(streamOf(t, parts[0], parts[1], parts[2], parts[3].with(flipped(img.Bootstrap))))), is: api.ErrObjectCorrupt},
		"that sends a stranger's image":   {first: lie(t, writes(streamOf(t, other...))), is: signer.ErrWrongKey},
		"that breaks off in the envelope": {first: lie(t, writes(stream[:100]))},
		"that breaks off at the end":      {first: lie(t, writes(stream[:len(stream)-12]))},
		"that is a web page":              {first: lie(t, writes([]byte("<html>")))},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := client.StoresConfig{Clients: []*client.Client{tt.first, good}, Backoff: time.Millisecond, AttemptTimeout: 30 * time.Second, Attempts: 2}
			s := &start{w: w, img: img}
			got := client.NewStores(cfg)
			config, boot, _, err := got.Start(t.Context(), img.Ref, img.Platform, nil, false, s.verify)
			if err != nil || !bytes.Equal(config, img.Config) || !bytes.Equal(boot, img.Bootstrap) {
				t.Errorf("config %q, bootstrap of %d bytes, error %v", config, len(boot), err)
			}
			if n := tt.first.Stats().Requests; n != 1 {
				t.Errorf("%d requests to the first store, want one", n)
			}
			cfg.Clients = []*client.Client{gone(t), tt.first}
			_, _, _, err = client.NewStores(cfg).Start(t.Context(), img.Ref, img.Platform, nil, false, s.verify)
			if err == nil || (tt.is != nil && !errors.Is(err, tt.is)) {
				t.Errorf("no other store: error %v, want %v", err, tt.is)
			}
			for _, c := range cfg.Clients {
				if err != nil && !strings.Contains(err.Error(), c.String()) {
					t.Errorf("the error does not tell what %s said: %v", c, err)
				}
			}
		})
	}
}

// A replica that lags behind is refused like any other older name, and the
// next one asked.
func TestAStartRefusesAnOlderNameAndAsksTheNextStore(t *testing.T) {
	old, now := apitest.New(t), apitest.New(t)
	now.Key = old.Key
	first := old.Publish(t, "a:b", 20, 1)
	now.Publish(t, "a:b", 20, 1)
	second := now.Publish(t, "a:b", 20, 2)
	seen := image.Seen{}
	get := func(cs ...*client.Client) ([]byte, error) {
		s := client.NewStores(client.StoresConfig{Clients: cs, Backoff: time.Millisecond})
		_, boot, _, err := s.Start(t.Context(), first.Ref, first.Platform, nil, false, func(name, st []byte) (*image.Verified, error) {
			v, err := image.Verify(st, name, image.Want{
				Ref: first.Ref, Platform: first.Platform, Trust: signer.NewTrust(old.Key.Public()), Seen: seen, Now: time.Now(),
			})
			if err == nil {
				seen = image.Seen{Serial: v.Name.Serial, Source: v.Name.Source}
			}
			return v, err
		})
		return boot, err
	}
	lagging, current := serveWorld(t, old), serveWorld(t, now)
	for range 2 {
		if boot, err := get(current, lagging); err != nil || !bytes.Equal(boot, second.Bootstrap) {
			t.Fatalf("bootstrap of %d bytes, error %v", len(boot), err)
		}
		if boot, err := get(lagging, current); err != nil || !bytes.Equal(boot, second.Bootstrap) {
			t.Fatalf("the first lags: bootstrap of %d bytes, error %v", len(boot), err)
		}
	}
	if _, err := get(lagging, gone(t)); !errors.Is(err, image.ErrRollback) {
		t.Errorf("only the one that lags: error %v, want ErrRollback", err)
	}
}

// Who can wait for an image is told so, whatever another store says.
func TestAnImageThatIsOnItsWaySomewhereIsPending(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	if err := w.Bucket.Delete(t.Context(), image.SigKey(img.Source, img.Platform, w.Key.Public().ID())); err != nil {
		t.Fatal(err)
	}
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{serveWorld(t, apitest.New(t)), serveWorld(t, w)}})
	_, err := s.Image(t.Context(), img.Ref, img.Platform)
	var e *api.Error
	if !errors.As(err, &e) || e.Status != http.StatusAccepted || s.Stats().Requests != 2 {
		t.Errorf("got error %v after %d requests", err, s.Stats().Requests)
	}
}

func TestMetadataComesFromTheStoreThatHasIt(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 20, 1)
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{serveWorld(t, apitest.New(t)), serveWorld(t, w)}})
	if doc, err := s.Image(t.Context(), img.Ref, img.Platform); err != nil || doc.Status != api.StatusReady {
		t.Errorf("image %+v, error %v", doc, err)
	}
	if p, err := s.Bootstrap(t.Context(), chunk.Sum(img.Bootstrap), int64(len(img.Bootstrap))); err != nil || !bytes.Equal(p, img.Bootstrap) {
		t.Errorf("bootstrap of %d bytes, error %v", len(p), err)
	}
	if p, err := s.Config(t.Context(), chunk.Sum(img.Config)); err != nil || !bytes.Equal(p, img.Config) {
		t.Errorf("config %q, error %v", p, err)
	}
}
