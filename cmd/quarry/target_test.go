package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/api"
	"quarry/signer"
	"quarry/store"
	"quarry/store/catalog"
	"quarry/worker"
)

func TestAFlagGoesBeforeTheOthersVariable(t *testing.T) {
	env := map[string]string{"QUARRY_DATA": "/d", "QUARRY_STORE": "http://s", "QUARRY_TRUST": "/k"}
	for name, c := range map[string]struct {
		env   map[string]string
		flags target
		want  target
	}{
		"flags alone":               {nil, target{data: "/x"}, target{data: "/x"}},
		"variables alone":           {map[string]string{"QUARRY_DATA": "/d"}, target{}, target{data: "/d"}},
		"--store and QUARRY_DATA":   {env, target{store: "http://x"}, target{store: "http://x", trust: "/k"}},
		"--data and QUARRY_STORE":   {env, target{data: "/x"}, target{data: "/x", trust: "/k"}},
		"--trust and QUARRY_TRUST":  {env, target{store: "http://x", trust: "/y"}, target{store: "http://x", trust: "/y"}},
		"both variables, no choice": {env, target{}, target{data: "/d", store: "http://s", trust: "/k"}},
	} {
		got := c.flags
		got.fromEnv(func(key string) string { return c.env[key] })
		if got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

func TestResolveSaysWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		flags target
		want  string
	}{
		"neither":        {target{}, "--data DIR"},
		"both":           {target{data: "/x", store: "http://x"}, "not both"},
		"no such folder": {target{data: "/no/such/folder"}, "has no store"},
		"a long path":    {target{data: "/" + strings.Repeat("x", 100), create: true}, "socket"},
		"not a folder":   {target{data: "/dev/null"}, "not a directory"},
	} {
		t.Setenv("QUARRY_DATA", "")
		t.Setenv("QUARRY_STORE", "")
		err := c.flags.resolve()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, c.want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want int
	}{
		"no error":                {nil, 0},
		"any error":               {errors.New("x"), 1},
		"wrong usage":             {usageError("x"), 2},
		"damage":                  {errDamage, 3},
		"a damaged chunk":         {fmt.Errorf("x: %w", &store.CorruptError{}), 3},
		"the server's word on it": {&api.Error{Code: "chunk_corrupt"}, 3},
		"a damaged object":        {&api.Error{Code: "object_corrupt"}, 3},
		"a signature on others":   {fmt.Errorf("x: %w", signer.ErrAltered), 3},
		"a damaged journal":       {fmt.Errorf("x: %w", catalog.ErrDamaged), 3},
		"a chunk that is gone":    {lost(fmt.Errorf("chunk: %w", store.ErrNotFound)), 3},
		"a bootstrap that is":     {lost(&api.Error{Code: "object_not_found"}), 3},
		"an untrusted key":        {signer.ErrWrongKey, 1},
		"an unknown image":        {&api.Error{Code: "tag_unknown"}, 1},
		"the command's own":       {exitStatus(42), 42},
		"run, any error":          {runError{errors.New("x")}, 125},
		"run, wrong usage":        {runError{usageError("x")}, 125},
		"run, no such command":    {runError{worker.ErrCommandNotFound}, 127},
		"run, not executable":     {runError{worker.ErrNotExecutable}, 126},
		"run, the command's two":  {exitStatus(2), 2},
		"run, its command failed": {exitStatus(1), 1},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%s: exit code %d, want %d", name, got, c.want)
		}
	}
}

func TestServeListensOnLoopbackOnly(t *testing.T) {
	for listen, ok := range map[string]bool{
		"127.0.0.1:0": true, "localhost:7070": true, "[::1]:7070": true,
		"127.0.0.1:junk": false, "127.0.0.1:99999": false, ":7070": false, "0.0.0.0:7070": false, "192.0.2.1:7070": false, "example.org:80": false, "nonsense": false,
	} {
		if err := (doors{listen: listen, noAuth: true}).check(); (err == nil) != ok {
			t.Errorf("--listen %s: got %v", listen, err)
		}
	}
	if err := (doors{listen: "0.0.0.0:0"}).check(); err == nil {
		t.Error("serve without --no-auth was accepted")
	}
}

func TestWrongCommandLinesAreUsageErrors(t *testing.T) {
	data := filepath.Join(t.TempDir(), "d")
	hex := strings.Repeat("0", 64)
	for name, c := range map[string]struct{ args, want string }{
		"no such command":        {"bogus", `no command "bogus"`},
		"no such flag":           {"--bogus", "bogus"},
		"index alone":            {"index", "needs one of its commands"},
		"index of nothing known": {"index bogus", `no command "bogus"`},
		"images of the same":     {"images bogus", "arguments"},
		"a platform":             {"convert oci:x --name a --platform junk --data " + data, "--platform junk: want OS/ARCH"},
		"a name":                 {"convert oci:x --name UPPER --data " + data, "UPPER"},
		"a digest for a name":    {"convert oci:x --name sha256:" + hex + " --data " + data, "is a digest"},
		"memory without a unit":  {"create --mem 512 t/task", "--mem 512: want 1M or more"},
		"less than a MiB":        {"create --mem 1000K t/task", "--mem 1000K: want 1M or more"},
		"less than a second":     {"create --ttl 500ms t/task", "--ttl 500ms: want a multiple of 1s"},
		"no time of idleness":    {"create --idle 1ns t/task", "--idle 1ns: want"},
		"no pause":               {"create --idle-pause 1us t/task", "--idle-pause 1µs: want"},
		"no processor":           {"create --cpus 0.0001 t/task", "--cpus 0.0001: want"},
		"a token for the socket": {"create --token-file /nope t/task", "--token-file is for --node"},
		"a CA for the socket":    {"ps --ca /nope", "--ca is for --node"},
		"a port":                 {"serve --no-auth --listen 127.0.0.1:junk --data " + data, "--listen 127.0.0.1:junk"},
	} {
		var stderr bytes.Buffer
		code := run(t.Context(), strings.Fields(c.args), strings.NewReader(""), &bytes.Buffer{}, &stderr)
		if code != exitUsage || !strings.Contains(stderr.String(), c.want) {
			t.Errorf("%s: exit code %d and %q, want %d and %q", name, code, stderr.String(), exitUsage, c.want)
		}
	}
	if _, err := os.Stat(data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a wrong command line made the data folder: %v", err)
	}
}

func TestServeRefusesAPathBeforeItMakesAnything(t *testing.T) {
	data := filepath.Join(t.TempDir(), strings.Repeat("x", 80))
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"serve", "--no-auth", "--listen", "127.0.0.1:0", "--data", data}, nil, &bytes.Buffer{}, &stderr)
	if code != exitFailure || !strings.Contains(stderr.String(), "socket address") {
		t.Errorf("exit code %d and %q", code, stderr.String())
	}
	if _, err := os.Stat(data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder was made: %v", err)
	}
}

// A server that is told to end while it starts has not failed: whoever waits for
// it starts another one.
func TestAServerThatIsToldToEndDuringItsStartEndsWell(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, more := range []string{"--background", "--no-auth --listen 127.0.0.1:0"} {
		args := append([]string{"serve", "--data", t.TempDir()}, strings.Fields(more)...)
		var stderr bytes.Buffer
		if code := run(ctx, args, nil, &bytes.Buffer{}, &stderr); code != exitOK {
			t.Errorf("%s: exit code %d and %q", more, code, stderr.String())
		}
	}
}
