package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestTokensGoOverLoopbackTLSOrByRequest(t *testing.T) {
	for name, c := range map[string]struct {
		o  doors
		ok bool
	}{
		"tokens on loopback":                 {doors{listen: "127.0.0.1:0"}, true},
		"tokens anywhere":                    {doors{listen: ":7070"}, false},
		"tokens anywhere, as wanted":         {doors{listen: ":7070", insecureHTTP: true}, true},
		"tokens anywhere, over TLS":          {doors{listen: ":7070", cert: "c", key: "k"}, true},
		"half a pair":                        {doors{listen: "127.0.0.1:0", cert: "c"}, false},
		"the other half":                     {doors{listen: "127.0.0.1:0", key: "k"}, false},
		"no tokens and a file of them":       {doors{listen: "127.0.0.1:0", noAuth: true, tokens: "t"}, false},
		"no tokens anywhere, even over TLS":  {doors{listen: ":7070", noAuth: true, cert: "c", key: "k"}, false},
		"no tokens anywhere, even by choice": {doors{listen: ":7070", noAuth: true, insecureHTTP: true}, false},
	} {
		if err := c.o.check(); (err == nil) != c.ok || err != nil && !errors.Is(err, errUsage) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// command runs quarry in this process.
func command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func TestTokenCommands(t *testing.T) {
	data := filepath.Join(t.TempDir(), "d")
	if code, _, stderr := command(t, "serve", "--data", data, "--listen", "127.0.0.1:0"); code != exitFailure || !strings.Contains(stderr, "quarry token create --data "+data) {
		t.Errorf("serve without a token: %d %q", code, stderr)
	}
	if _, err := os.Stat(data); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused serve has made the folder: %v", err)
	}
	code, secret, stderr := command(t, "token", "create", "--data", data, "--scope", "push,pull", "--repo", "team/", "--expires", "1h", "--label", "ci")
	if code != 0 || !strings.HasPrefix(secret, "qry_") || !strings.Contains(stderr, "pull,push in team, until ") || strings.Contains(stderr, strings.TrimSpace(secret)[17:]) {
		t.Fatalf("create: %d %q", code, stderr)
	}
	id := secret[4:16]
	if _, out, _ := command(t, "token", "ls", "--data", data); !strings.Contains(out, id+"  pull,push  team") || !strings.Contains(out, "ci") {
		t.Errorf("ls: %s", out)
	}
	_, out, _ := command(t, "token", "ls", "--json", "--data", data)
	var doc struct {
		Version int
		Tokens  []tokenInfo
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil || doc.Version != 1 || len(doc.Tokens) != 1 || doc.Tokens[0].ID != id || doc.Tokens[0].Expired {
		t.Errorf("ls --json: %s, %v", out, err)
	}
	if strings.Contains(out, secret[20:40]) {
		t.Error("ls shows the secret")
	}
	if code, _, stderr := command(t, "token", "rm", "--data", data, "000000000000"); code != exitFailure || !strings.Contains(stderr, "no such token") {
		t.Errorf("rm of another: %d %q", code, stderr)
	}
	if code, _, stderr := command(t, "token", "rm", "--data", data, id); code != 0 {
		t.Errorf("rm: %d %q", code, stderr)
	}
	if _, out, _ := command(t, "token", "ls", "--data", data); strings.Contains(out, id) {
		t.Errorf("after rm: %s", out)
	}
	for name, args := range map[string][]string{
		"no scope": {}, "an unknown scope": {"--scope", "read"}, "admin of a repository": {"--scope", "admin", "--repo", "a"},
		"a repository that is none": {"--scope", "pull", "--repo", "A//b"}, "over already": {"--scope", "pull", "--expires", "-1h"},
		"a long label": {"--scope", "pull", "--label", strings.Repeat("x", 1000)},
	} {
		if code, _, stderr := command(t, append([]string{"token", "create", "--data", data}, args...)...); code != exitUsage {
			t.Errorf("%s: %d %q", name, code, stderr)
		}
	}
}

// writePair makes a self-signed pair for 127.0.0.1.
func writePair(t *testing.T, cert, key string, serial int64) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "quarry test"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, priv.Public(), priv)
	if err != nil {
		t.Fatal(err)
	}
	sec, err := x509.MarshalPKCS8PrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: sec}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestACertificateIsReadAgainAndABrokenOneIsNot(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if _, err := loadCertificate(cert, key, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a pair that is not there was loaded")
	}
	writePair(t, cert, key, 1)
	var log bytes.Buffer
	c, err := loadCertificate(cert, key, slog.New(slog.NewJSONHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	// serial connects and returns that of the server's certificate.
	serial := func(max uint16) int64 {
		t.Helper()
		c.looked = time.Time{} // as if a second had passed
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		server := tls.NewListener(l, c.config())
		done := make(chan struct{})
		go func() { // ends with its one connection
			defer close(done)
			if conn, err := server.Accept(); err == nil {
				_ = conn.(*tls.Conn).Handshake()
				conn.Close()
			}
		}()
		defer func() { <-done }()
		conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true, MaxVersion: max})
		if err != nil {
			return 0
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	if got := serial(0); got != 1 {
		t.Errorf("serial %d, want 1", got)
	}
	if got := serial(tls.VersionTLS11); got != 0 {
		t.Error("TLS 1.1 was taken")
	}
	writePair(t, cert, key, 2)
	if got := serial(0); got != 2 {
		t.Errorf("after the change: serial %d, want 2", got)
	}
	if err := os.WriteFile(key, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got := serial(0); got != 2 {
			t.Errorf("with a broken pair: serial %d, want 2", got)
		}
	}
	if n := strings.Count(log.String(), "the one from before stays"); n != 1 {
		t.Errorf("a broken pair was logged %d times: %s", n, log.String())
	}
	writePair(t, cert, key, 3)
	if got := serial(0); got != 3 {
		t.Errorf("after it was put right: serial %d, want 3", got)
	}
}

// A page whose name was made to lead to this machine gets nothing of a server that asks for
// no token: neither by the API nor as a registry.
func TestWithoutTokensTheHostIsThisMachine(t *testing.T) {
	w := newPushWorld(t, false)
	h := w.handler.WithLocal(false)
	for host, want := range map[string]int{
		"127.0.0.1": 200, "127.0.0.1:7070": 200, "[::1]:7070": 200, "localhost": 200, "LocalHost:7070": 200, "10.1.2.3:7070": 200, "": 200,
		"evil.example": 421, "evil.example:7070": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421, "127.0.0.1@evil.example": 421,
	} {
		for _, path := range []string{"/v1/images", "/v2/", "/"} {
			r := httptest.NewRequest("GET", path, nil)
			r.Host = host
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, r)
			if rec.Code != want || want == 421 && !strings.Contains(rec.Body.String(), "wrong_host") {
				t.Errorf("%s of %q: %d %s, want %d", path, host, rec.Code, rec.Body, want)
			}
		}
	}
	r := httptest.NewRequest("GET", "/v1/images", nil)
	r.Host = "evil.example"
	rec := httptest.NewRecorder()
	if h.WithLocal(true).ServeHTTP(rec, r); rec.Code != 200 {
		t.Errorf("over the local socket: %d", rec.Code)
	}
}
