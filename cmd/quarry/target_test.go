package main

import (
	"errors"
	"strings"
	"testing"

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
		":7070": false, "0.0.0.0:7070": false, "192.0.2.1:7070": false, "example.org:80": false, "nonsense": false,
	} {
		if err := checkListen(serveOptions{listen: listen, noAuth: true}); (err == nil) != ok {
			t.Errorf("--listen %s: got %v", listen, err)
		}
	}
	if err := checkListen(serveOptions{listen: "127.0.0.1:0"}); err == nil {
		t.Error("serve without --no-auth was accepted")
	}
}
