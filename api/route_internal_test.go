package api

import (
	"errors"
	"strings"
	"testing"
)

const someHex = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func TestRequestLinesParse(t *testing.T) {
	tests := []struct {
		method, path, query string
		want                op
	}{
		{"GET", "/v1/images", "", opImages},
		{"GET", "/v1/images", "after=a%3Ab&limit=3", opImages},
		{"GET", "/v1/images/python", "", opImage},
		{"GET", "/v1/images/a/b/c:1.0", "platform=linux%2Famd64", opImage},
		{"GET", "/v1/images/a/b/c%3A1.0", "", opImage},
		{"GET", "/v1/images/a/b@sha256:" + someHex, "platform=linux/arm64", opImage},
		{"GET", "/v1/images/a/b%40sha256%3a" + someHex, "", opImage},
		{"DELETE", "/v1/images/a/b:c", "", opImageDelete},
		{"POST", "/v1/images/" + someHex + "/trace", "", opTrace},
		{"GET", "/v1/images/a/trace", "", opImage},
		{"GET", "/v1/signatures/a/b:c", "", opSignatures},
		{"POST", "/v1/signatures/a/b:c@sha256:" + someHex, "", opSign},
		{"GET", "/v1/start/a/b:c", "platform=linux/amd64&have=" + someHex, opStart},
		{"GET", "/v1/bootstraps/sha256:" + someHex, "", opBootstrap},
		{"GET", "/v1/configs/sha256:" + someHex, "", opConfig},
		{"GET", "/v1/chunks/sha256:" + someHex, "", opChunk},
		{"POST", "/v1/chunks:batchGet", "", opBatch},
		{"GET", "/v1/blobs/" + someHex, "", opBlob},
		{"HEAD", "/v1/blobs/" + someHex, "", opBlob},
		{"POST", "/v1/convert", "", opConvert},
		{"POST", "/v1/admin/check", "quick=true", opCheck},
		{"POST", "/v1/admin/rebuild", "", opRebuild},
		{"GET", "/v1/admin/leases", "", opLeases},
		{"PUT", "/v1/admin/leases/a-b.C_9", "", opLeasePut},
		{"DELETE", "/v1/admin/leases/x", "", opLeaseDelete},
		{"GET", "/v1/stats", "", opStats},
		{"GET", "/metrics", "", opMetrics},
		{"GET", "/healthz", "", opHealth},
		{"GET", "/readyz", "", opReady},
	}
	for _, tt := range tests {
		rt, row, err := parse(tt.method, tt.path, tt.query)
		if err != nil || rt.op != tt.want || row == nil {
			t.Errorf("%s %s?%s: got operation %d, error %v, want %d", tt.method, tt.path, tt.query, rt.op, err, tt.want)
		}
	}
}

func TestRequestLinesAreRefused(t *testing.T) {
	tests := map[string]struct {
		method, path, query string
		want                error
	}{
		"unknown route":             {"GET", "/v1/nothing", "", ErrNoRoute},
		"root, written otherwise":   {"GET", "/%2f", "", ErrBadRequest},
		"empty path":                {"GET", "", "", ErrBadRequest},
		"no leading slash":          {"GET", "v1/images", "", ErrBadRequest},
		"trailing slash":            {"GET", "/v1/images/", "", ErrBadRequest},
		"double slash":              {"GET", "/v1//images", "", ErrBadRequest},
		"dot dot":                   {"GET", "/v1/images/../stats", "", ErrBadRequest},
		"escaped dot dot":           {"GET", "/v1/images/%2e%2e/stats", "", ErrBadRequest},
		"escaped slash":             {"GET", "/v1/images/a%2Fb", "", ErrBadRequest},
		"double escape":             {"GET", "/v1/images/a%252e", "", ErrBadRequest},
		"NUL":                       {"GET", "/v1/images/a%00", "", ErrBadRequest},
		"backslash":                 {"GET", `/v1/images/a\b`, "", ErrBadRequest},
		"broken escape":             {"GET", "/v1/images/a%zz", "", ErrBadRequest},
		"not ASCII":                 {"GET", "/v1/images/ü", "", ErrBadRequest},
		"long path":                 {"GET", "/v1/images/" + strings.Repeat("a", maxTarget), "", ErrBadRequest},
		"upper-case repository":     {"GET", "/v1/images/Python", "", ErrBadRequest},
		"short digest":              {"GET", "/v1/chunks/sha256:abcd", "", ErrBadRequest},
		"upper-case digest":         {"GET", "/v1/chunks/sha256:" + strings.ToUpper(someHex), "", ErrBadRequest},
		"bare hex for a chunk":      {"GET", "/v1/chunks/" + someHex, "", ErrBadRequest},
		"digest for a blob":         {"GET", "/v1/blobs/sha256:" + someHex, "", ErrBadRequest},
		"a path below a chunk":      {"GET", "/v1/chunks/sha256:" + someHex + "/x", "", ErrBadRequest},
		"another method":            {"PUT", "/v1/images/a", "", ErrMethod},
		"a trace of a name":         {"POST", "/v1/images/a/trace", "", ErrBadRequest},
		"a trace of nothing":        {"POST", "/v1/images/" + someHex, "", ErrBadRequest},
		"a trace below a trace":     {"POST", "/v1/images/" + someHex + "/trace/trace", "", ErrBadRequest},
		"signatures of no name":     {"POST", "/v1/signatures/", "", ErrBadRequest},
		"HEAD of a chunk":           {"HEAD", "/v1/chunks/sha256:" + someHex, "", ErrMethod},
		"CONNECT":                   {"CONNECT", "/healthz", "", ErrMethod},
		"unknown query":             {"GET", "/v1/images/a", "x=1", ErrBadRequest},
		"id with its algorithm":     {"GET", "/v1/start/a", "have=sha256:" + someHex, ErrBadRequest},
		"parameter twice":           {"GET", "/v1/images/a", "platform=linux/amd64&platform=linux/arm64", ErrBadRequest},
		"parameter of another":      {"GET", "/v1/stats", "limit=1", ErrBadRequest},
		"limit too high":            {"GET", "/v1/images", "limit=1001", ErrBadRequest},
		"limit negative":            {"GET", "/v1/images", "limit=-1", ErrBadRequest},
		"platform that is none":     {"GET", "/v1/images/a", "platform=../..", ErrBadRequest},
		"semicolon query":           {"GET", "/v1/images", "after=a;limit=1", ErrBadRequest},
		"long query":                {"GET", "/v1/images", "after=" + strings.Repeat("a", maxTarget), ErrBadRequest},
		"lease id with odd bytes":   {"GET", "/v1/admin/leases/a:b", "", ErrBadRequest},
		"lease id that is too long": {"GET", "/v1/admin/leases/" + strings.Repeat("a", 65), "", ErrBadRequest},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			rt, _, err := parse(tt.method, tt.path, tt.query)
			if !errors.Is(err, tt.want) {
				t.Errorf("%s %s: got operation %d, error %v, want %v", tt.method, tt.path, rt.op, err, tt.want)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add("GET", "/v1/images/a/b:c", "platform=linux/amd64")
	f.Add("GET", "/v1/blobs/"+someHex, "")
	f.Add("PUT", "/v1/admin/leases/x", "")
	f.Fuzz(func(t *testing.T, method, path, query string) {
		rt, row, err := parse(method, path, query)
		if err != nil {
			if e := toError(err); e.Status < 400 || e.Status >= 500 || e.Blame != BlameUser {
				t.Fatalf("a bad request line is answered with %d %s", e.Status, e.Code)
			}
			return
		}
		if row == nil || rt.op == opNone || row.methods[method] != rt.op {
			t.Fatalf("%q %q was accepted as operation %d of no row", method, path, rt.op)
		}
		if strings.Contains(rt.lease, "/") || strings.Contains(rt.ref.Repo, "..") {
			t.Fatalf("%q got through: lease %q, repository %q", path, rt.lease, rt.ref.Repo)
		}
	})
}

func TestEveryRowOfTheErrorTableIsReachable(t *testing.T) {
	codes := make(map[string]bool)
	for _, r := range errorTable {
		if codes[r.code] {
			t.Errorf("code %s stands twice in the error table", r.code)
		}
		codes[r.code] = true
		if e := toError(r.target); e.Code != r.code || e.Status != r.status {
			t.Errorf("%v becomes %d %s, want %d %s", r.target, e.Status, e.Code, r.status, r.code)
		}
		if e := (&Error{Code: r.code}); !errors.Is(e, r.target) {
			t.Errorf("an error of code %s does not match %v", r.code, r.target)
		}
	}
}

func TestRanges(t *testing.T) {
	const size = 1000
	tests := map[string]struct {
		start, end int64
		partial    bool
		refused    bool
	}{
		"bytes=0-0":                    {0, 1, true, false},
		"bytes=0-999":                  {0, 1000, true, false},
		"bytes=10-":                    {10, 1000, true, false},
		"bytes=-1":                     {999, 1000, true, false},
		"bytes=-5000":                  {0, 1000, true, false},
		"bytes=990-2000":               {990, 1000, true, false},
		"bytes=5-99999999999999999999": {5, 1000, true, false},
		"BYTES=1-2":                    {1, 3, true, false},
		"lines=1-2":                    {0, 1000, false, false},
		"bytes=1000-":                  {refused: true},
		"bytes=99999999999999999999-":  {refused: true},
		"bytes=-0":                     {refused: true},
		"bytes=-":                      {refused: true},
		"bytes=":                       {refused: true},
		"bytes":                        {refused: true},
		"bytes=5":                      {refused: true},
		"bytes=5-4":                    {refused: true},
		"bytes=+1-2":                   {refused: true},
		"bytes=1- 2":                   {refused: true},
		"bytes=0x1-2":                  {refused: true},
		"bytes=0-1,5-6":                {refused: true},
		"bytes=--1":                    {refused: true},
	}
	for header, want := range tests {
		got, err := parseRange([]string{header}, size)
		if want.refused != errors.Is(err, ErrRange) || got.start != want.start || got.end != want.end || got.partial != want.partial {
			t.Errorf("%q: got %+v, error %v, want %+v", header, got, err, want)
		}
	}
	if _, err := parseRange([]string{"bytes=0-1", "bytes=5-6"}, size); !errors.Is(err, ErrRange) {
		t.Errorf("two headers: got error %v, want %v", err, ErrRange)
	}
}

func TestAcceptEncoding(t *testing.T) {
	tests := map[string]bool{
		"": false, "zstd": true, "gzip, zstd": true, "ZSTD;q=0.5": true, "zstd;q=0": false, "zstd; q=0.0": false,
		"gzip": false, "*": false, "zstdx": false, "zstd;q=x": false,
	}
	for header, want := range tests {
		if got := acceptsZstd([]string{header}); got != want {
			t.Errorf("Accept-Encoding %q: got %t, want %t", header, got, want)
		}
	}
}
