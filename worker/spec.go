package worker

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode/utf8"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"quarry/store/image"
	"quarry/worker/folder"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// runsHere refuses an image of another architecture before anything is mounted.
func runsHere(im *folder.Image) error {
	host := image.HostPlatform()
	p := im.Statement.Platform
	if p.OS != host.OS || p.Arch != host.Arch {
		return fmt.Errorf("%w: it is %s, this machine runs %s; convert the image with --platform %s", ErrPlatform, p, host, host)
	}
	return nil
}

// newSpec makes the OCI runtime spec of a command in the image mounted at root.
// Everything it looks up, users and programs, is looked up inside the image.
func newSpec(im *folder.Image, root string, c Command) (*specs.Spec, error) {
	var config v1.Image
	if err := json.Unmarshal(im.Config, &config); err != nil {
		return nil, fmt.Errorf("image config %s: %w", im.Statement.Config, err)
	}
	r, err := openRoot(root)
	if err != nil {
		return nil, err
	}
	defer r.close()
	p, err := newProcess(r, config.Config, c)
	if err != nil {
		return nil, err
	}
	mounts := baseMounts()
	switch there, err := r.isDir(p.Cwd); {
	case err != nil:
		return nil, fmt.Errorf("working directory %q: %w", p.Cwd, err)
	case !there:
		// The runtimes make a missing working directory; the image cannot be
		// written, so it becomes a mount point.
		mounts = append(mounts, specs.Mount{Destination: p.Cwd, Type: "tmpfs", Source: "tmpfs"})
	}
	return &specs.Spec{
		Version: specs.Version, Process: p, Hostname: "sandbox", Mounts: mounts,
		Root: &specs.Root{Path: root},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
			{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
		}},
	}, nil
}

func newProcess(r *root, config v1.ImageConfig, c Command) (*specs.Process, error) {
	userName := c.User
	if userName == "" {
		userName = config.User
	}
	u, err := r.lookupUser(userName)
	if err != nil {
		return nil, err
	}
	env := mergeEnv([]string{defaultPath, "HOME=" + u.home}, config.Env, c.Env)
	if c.Terminal {
		env = mergeEnv([]string{"TERM=xterm"}, env)
	}
	cwd := c.WorkDir
	if cwd == "" {
		cwd = config.WorkingDir
	}
	if !path.IsAbs(cwd) {
		cwd = path.Join("/", cwd)
	}
	args, err := commandLine(config, c)
	if err != nil {
		return nil, err
	}
	if err := checkText(args, env, []string{cwd}); err != nil {
		return nil, err
	}
	if !c.given {
		if err := r.checkCommand(args[0], cwd, env); err != nil {
			return nil, err
		}
	}
	return &specs.Process{
		Terminal: c.Terminal, Args: args, Env: env, Cwd: path.Clean(cwd), Capabilities: Capabilities(u.uid),
		User:    specs.User{UID: u.uid, GID: u.gid, AdditionalGids: u.groups},
		Rlimits: rlimits(),
	}, nil
}

// rlimits are a process's, every one that there is: runsc gives the first processes of
// all commands one set of limits, and puts back in it, when a command begins, what is
// named here. What is not would hold for each command after the one that set it. Their
// values are those that runsc has for what is not named, but for the files of the host.
func rlimits() (list []specs.POSIXRlimit) {
	const none = math.MaxUint64
	for _, name := range []string{"AS", "CORE", "CPU", "DATA", "FSIZE", "LOCKS", "NPROC", "RSS", "RTTIME"} {
		list = append(list, specs.POSIXRlimit{Type: "RLIMIT_" + name, Hard: none, Soft: none})
	}
	for _, name := range []string{"NICE", "RTPRIO", "SIGPENDING"} {
		list = append(list, specs.POSIXRlimit{Type: "RLIMIT_" + name})
	}
	return append(list,
		specs.POSIXRlimit{Type: "RLIMIT_MEMLOCK", Hard: 64 << 10, Soft: 64 << 10},
		specs.POSIXRlimit{Type: "RLIMIT_MSGQUEUE", Hard: 800 << 10, Soft: 800 << 10},
		specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Hard: 1 << 20, Soft: 1 << 20},
		specs.POSIXRlimit{Type: "RLIMIT_STACK", Hard: none, Soft: 8 << 20},
	)
}

// commandLine joins entrypoint and arguments as docker does: arguments replace
// Cmd and follow Entrypoint; another entrypoint drops the image's Cmd.
func commandLine(config v1.ImageConfig, c Command) ([]string, error) {
	if c.given {
		return []string{givenInit}, nil
	}
	entry, cmd := config.Entrypoint, config.Cmd
	if len(c.Entrypoint) > 0 {
		entry, cmd = c.Entrypoint, nil
	}
	if len(c.Args) > 0 {
		cmd = c.Args
	}
	args := append(append([]string(nil), entry...), cmd...)
	if len(args) == 0 || args[0] == "" {
		return nil, fmt.Errorf("the image names no command: give one after the image")
	}
	return args, nil
}

// checkText refuses what the runtime's JSON could only pass on changed.
func checkText(lists ...[]string) error {
	for _, list := range lists {
		for _, text := range list {
			if !utf8.ValidString(text) || strings.Contains(text, "\x00") {
				return fmt.Errorf("argument or variable %q: only UTF-8 without NUL can be given to a sandbox", text)
			}
		}
	}
	return nil
}

// mergeEnv joins lists of K=V; a later value of a key replaces the earlier one
// in its place.
func mergeEnv(lists ...[]string) []string {
	var out []string
	at := map[string]int{}
	for _, list := range lists {
		for _, kv := range list {
			key, _, given := strings.Cut(kv, "=")
			if !given || key == "" {
				continue // an image's list may hold anything
			}
			if i, ok := at[key]; ok {
				out[i] = kv
				continue
			}
			at[key] = len(out)
			out = append(out, kv)
		}
	}
	return out
}

func baseMounts() []specs.Mount {
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc"},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts"},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
}

// defaultCapabilities is docker's default set.
func defaultCapabilities() []string {
	return []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
}

func writeSpec(dir string, spec *specs.Spec) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}
