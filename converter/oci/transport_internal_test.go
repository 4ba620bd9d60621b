package oci

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
)

// Nothing listens where these requests would go; whether they may is decided
// before.
func TestPlainHTTPIsForThisMachineOnly(t *testing.T) {
	const nowhere = "127.0.0.1:1"
	tests := []struct {
		registry, url string
		refused       bool
	}{
		{"localhost:5000", "http://" + nowhere + "/v2/", false},
		{"127.0.0.1:5000", "http://" + nowhere + "/v2/", false},
		{"[::1]:5000", "http://" + nowhere + "/v2/", false},
		{"127.0.0.1:5000", "http://192.0.2.1/v2/", true},
		{"192.168.0.1:5000", "http://192.168.0.1:5000/v2/", true},
		{"10.0.0.1:5000", "http://10.0.0.1:5000/v2/", true},
		{"registry.local:5000", "http://registry.local:5000/v2/", true},
		{"registry.example.com", "http://registry.example.com/v2/", true},
		{"registry.example.com", "http://" + nowhere + "/latest/meta-data/", true}, // what a registry may redirect to
		{"localhost.example.com:80", "http://localhost.example.com:80/v2/", true},
		{"registry.example.com", "ftp://" + nowhere + "/", true},
		{"registry.example.com", "https://" + nowhere + "/v2/", false},
	}
	for _, tt := range tests {
		reg, err := name.NewRegistry(tt.registry)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, tt.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := newTransport(reg, Config{}.withDefaults()).RoundTrip(req)
		if err == nil {
			resp.Body.Close()
			t.Errorf("%s answers", tt.url)
		}
		if got := errors.Is(err, errPlainHTTP); got != tt.refused {
			t.Errorf("registry %s, request %s: refused %v, want %v (%v)", tt.registry, tt.url, got, tt.refused, err)
		}
	}
}

// By a transport that somebody gave with a store's URL, the scheme of that is the only
// one, so that a token goes nowhere that the URL did not say.
func TestAStoresSchemeIsTheOnlyOne(t *testing.T) {
	for _, plain := range []bool{true, false} {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v2/" {
				w.WriteHeader(http.StatusNotFound)
			}
		}))
		s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
		cfg := Config{Transport: &http.Transport{}, Plain: plain, RetryWait: time.Millisecond}
		if plain {
			s.Start()
		} else {
			s.StartTLS()
			cfg.Transport = s.Client().Transport.(*http.Transport)
		}
		for _, asPlain := range []bool{true, false} {
			cfg.Plain = asPlain
			b, err := openRegistry(t.Context(), "//"+s.Listener.Addr().String()+"/p/x", cfg.withDefaults())
			if err != nil {
				t.Fatal(err)
			}
			_, err = b.top(t.Context())
			if got := errors.Is(err, ErrNoBlob); got != (plain == asPlain) {
				t.Errorf("plain %t, asked as plain %t: %v", plain, asPlain, err)
			}
			b.Close()
		}
		s.Close()
	}
}

// A registry elsewhere that knows no https is not one that is out of reach for a
// while: it is asked once and told apart.
func TestARegistryElsewhereThatSpeaksPlainHTTPIsRefusedAtOnce(t *testing.T) {
	var plain atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { plain.Add(1) }))
	defer s.Close()
	for _, host := range []string{"registry.example.com", "registry.example.com:5000", "192.168.0.1:5000", "registry.local"} {
		b, err := openRegistry(t.Context(), "//"+host+"/p/x", Config{RetryWait: time.Millisecond}.withDefaults())
		if err != nil {
			t.Fatal(err)
		}
		r := b.(*registry)
		var dials atomic.Int64
		r.base.base.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			dials.Add(1)
			return new(net.Dialer).DialContext(ctx, network, s.Listener.Addr().String())
		}
		_, err = r.top(t.Context())
		if !errors.Is(err, errPlainHTTP) || errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), host) {
			t.Errorf("%s: error %v", host, err)
		}
		if n := dials.Load(); n != 1 {
			t.Errorf("%s: %d connections", host, n)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := plain.Load(); n != 0 {
		t.Errorf("%d requests in plain http", n)
	}
}
