package worker

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// rootOf lays out files in a folder and opens it as an image root.
func rootOf(t *testing.T, files map[string]string, links map[string]string) *root {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	r, err := openRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

const (
	passwd = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n1234:x:7:8::/seven:\nshort\n"
	group  = "root:x:0:\nstaff:x:50:app,other\napp:x:1001:\nextra:x:60:other,app\n"
)

func TestUsersAreLookedUpInsideTheImage(t *testing.T) {
	r := rootOf(t, map[string]string{"etc/passwd": passwd, "etc/group": group}, nil)
	for spec, want := range map[string]identity{
		"":           {home: "/root"},
		"0":          {home: "/root"},
		"app":        {uid: 1000, gid: 1001, groups: []uint32{50, 60}, home: "/home/app"},
		"1000":       {uid: 1000, gid: 1001, groups: []uint32{50, 60}, home: "/home/app"},
		"app:staff":  {uid: 1000, gid: 50, home: "/home/app"},
		"app:77":     {uid: 1000, gid: 77, home: "/home/app"},
		"4242":       {uid: 4242, home: "/"},
		"4242:extra": {uid: 4242, gid: 60, home: "/"},
		"1234":       {uid: 7, gid: 8, home: "/seven"}, // a name goes before a number
	} {
		got, err := r.lookupUser(spec)
		if err != nil {
			t.Errorf("user %q: %v", spec, err)
			continue
		}
		if got.uid != want.uid || got.gid != want.gid || got.home != want.home || !slices.Equal(got.groups, want.groups) {
			t.Errorf("user %q: got %+v, want %+v", spec, got, want)
		}
	}
	for _, bad := range []string{"nobody", "app:nogroup", "-1", "4294967296"} {
		if got, err := r.lookupUser(bad); err == nil {
			t.Errorf("user %q: got %+v, want an error", bad, got)
		}
	}
}

func TestUsersOfAnImageWithoutPasswd(t *testing.T) {
	r := rootOf(t, nil, nil)
	if got, err := r.lookupUser("12:34"); err != nil || got.uid != 12 || got.gid != 34 {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := r.lookupUser("app"); err == nil {
		t.Error("a name without /etc/passwd was accepted")
	}
}

// The host's files must not be read through a symlink in the image.
func TestLookupsStayInsideTheImage(t *testing.T) {
	r := rootOf(t, map[string]string{"data/passwd": "evil:x:66:66::/:\n", "bin/tool": "x"}, map[string]string{
		"etc": "data", "abs": "/bin", "up": "../../../../../bin",
	})
	if got, err := r.lookupUser("evil"); err != nil || got.uid != 66 {
		t.Errorf("a symlink inside the image was not followed: %+v, %v", got, err)
	}
	for _, name := range []string{"/abs/tool", "/up/tool", "up/tool"} {
		if err := r.checkCommand(name, "/", nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := r.checkCommand("/abs/sh", "/", nil); !errors.Is(err, ErrCommandNotFound) {
		t.Errorf("the host's /bin/sh was found: %v", err)
	}
}

func TestCommandsAreFoundAsAShellDoes(t *testing.T) {
	r := rootOf(t, map[string]string{"usr/bin/run": "x", "app/tool": "x", "plain": "x"}, nil)
	if err := os.Chmod(filepath.Join("/proc/self/fd", itoa(r.fd), "plain"), 0o644); err != nil {
		t.Fatal(err)
	}
	env := []string{"PATH=/nowhere:/usr/bin:/"}
	for name, want := range map[string]error{
		"run": nil, "./tool": nil, "/app/tool": nil, "tool": ErrCommandNotFound, "/app/none": ErrCommandNotFound,
		"plain": ErrNotExecutable, "/app": ErrNotExecutable, "/plain/x": ErrCommandNotFound,
	} {
		if err := r.checkCommand(name, "/app", env); !errors.Is(err, want) || (want == nil) != (err == nil) {
			t.Errorf("command %q: got %v, want %v", name, err, want)
		}
	}
}

func TestCommandLineIsDockers(t *testing.T) {
	config := v1.ImageConfig{Entrypoint: []string{"/init", "-x"}, Cmd: []string{"serve"}}
	for name, c := range map[string]struct {
		command Command
		want    []string
	}{
		"the image's own":                   {Command{}, []string{"/init", "-x", "serve"}},
		"arguments replace Cmd":             {Command{Args: []string{"a", "b"}}, []string{"/init", "-x", "a", "b"}},
		"an entrypoint drops Cmd":           {Command{Entrypoint: []string{"/sh"}}, []string{"/sh"}},
		"an entrypoint takes the arguments": {Command{Entrypoint: []string{"/sh"}, Args: []string{"-c"}}, []string{"/sh", "-c"}},
	} {
		got, err := commandLine(config, c.command)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, c.want)
		}
	}
	if got, err := commandLine(v1.ImageConfig{}, Command{}); err == nil {
		t.Errorf("an image without a command: got %q", got)
	}
}

func TestLaterEnvironmentWins(t *testing.T) {
	got := mergeEnv([]string{"PATH=/bin", "A=1"}, []string{"A=2", "B=3"}, []string{"B="})
	if want := []string{"PATH=/bin", "A=2", "B="}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func itoa(n int) string { return strconv.Itoa(n) }

func TestAWorkingDirectoryIsAFolderOrMissing(t *testing.T) {
	r := rootOf(t, map[string]string{"dir/file": "x"}, map[string]string{"link": "/dir", "loop": "loop"})
	for name, want := range map[string]bool{"/": true, "/dir": true, "/link": true, "/none": false, "/none/below": false} {
		if got, err := r.isDir(name); err != nil || got != want {
			t.Errorf("%s: got %t, %v, want %t", name, got, err, want)
		}
	}
	for _, bad := range []string{"/dir/file", "/dir/file/x", "/loop"} {
		if got, err := r.isDir(bad); err == nil {
			t.Errorf("%s: got %t, want an error", bad, got)
		}
	}
}
