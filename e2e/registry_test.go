package e2e_test

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/rogpeppe/go-internal/testscript"
)

// startRegistry runs a registry that wants a password, and writes the docker
// config of a user who has it: registry DOCKER_CONFIG [CERT]. It sets REGISTRY and
// CREDS. With CERT it speaks https, and writes the certificate to trust there.
func startRegistry(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 || len(args) > 2 {
		ts.Fatalf("usage: registry DOCKER_CONFIG [CERT]")
	}
	const user, pass = "robot", "s3cret-of-the-registry"
	real := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, 0)))
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u != user || p != pass {
			w.Header().Set("WWW-Authenticate", `Basic realm="story"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		real.ServeHTTP(w, r)
	}))
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0) // of clients that trust nobody
	if len(args) == 2 {
		s.StartTLS()
		cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
		ts.Check(os.WriteFile(ts.MkAbs(args[1]), cert, 0o600))
	} else {
		s.Start()
	}
	ts.Defer(s.Close)
	host := s.Listener.Addr().String()
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + pass))
	b, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]string{"auth": auth}}})
	ts.Check(err)
	dir := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(dir, 0o700))
	ts.Check(os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600))
	ts.Setenv("REGISTRY", host)
	ts.Setenv("CREDS", user+":"+pass)
}
