package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const suite = "bookworm"

// listAge is how long package lists are used before they are read again: long
// enough for a build to see one state of the archive.
const listAge = 24 * time.Hour

// The two scripts that mmdebstrap calls with the new root as $1. Lists and
// archives are copied in and not linked, so that no build can harm the cache.
const (
	sourceHook = `sed 's/^deb /deb-src /' "$1/etc/apt/sources.list" >"$1/etc/apt/sources.list.d/source.list"`
	setupHook  = `mkdir -p "$1/var/cache/apt/archives" "$1/var/lib/apt/lists"
find "$QUARRY_DEBS" -name '*.deb' -exec cp -t "$1/var/cache/apt/archives" {} +
cp -r "$QUARRY_LISTS/." "$1/var/lib/apt/lists/"`
)

func (b *builder) lists() string { return filepath.Join(b.cfg.Dir, ".lists") }

// fetchLists reads the package lists once for all images.
func (b *builder) fetchLists(ctx context.Context) error {
	if fi, err := os.Stat(b.lists()); err == nil && time.Since(fi.ModTime()) < listAge {
		return nil
	}
	root := filepath.Join(b.ram, "lists")
	if err := b.mmdebstrap(ctx, b.ram, "--variant=custom", "--skip=cleanup/apt", "--setup-hook="+sourceHook, suite, root); err != nil {
		return fmt.Errorf("read package lists: %w", err)
	}
	fresh := b.lists() + ".new"
	if err := errors.Join(os.RemoveAll(fresh), os.MkdirAll(fresh, 0o755)); err != nil {
		return err
	}
	if err := copyNew(filepath.Join(root, "var/lib/apt/lists"), fresh, "*_*"); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(b.lists()), os.Rename(fresh, b.lists()), os.RemoveAll(root))
}

// base makes the first layer's file system and removes what a build leaves.
func (b *builder) base(ctx context.Context, r Recipe, work, root string) error {
	args := []string{
		"--variant=" + r.Variant, "--skip=download/empty,essential/unlink,update,cleanup/apt", "--setup-hook=" + setupHook,
		`--aptopt=APT::Install-Recommends "false"`, "--dpkgopt=force-unsafe-io",
	}
	if len(r.Packages) > 0 {
		args = append(args, "--include="+strings.Join(r.Packages, ","))
	}
	if err := b.mmdebstrap(ctx, work, append(args, suite, root)...); err != nil {
		return err
	}
	if err := copyNew(filepath.Join(root, "var/cache/apt/archives"), b.cfg.Debs, "*.deb"); err != nil {
		return err
	}
	for _, dir := range []string{"dev", "var/cache/apt/archives", "var/lib/apt/lists"} {
		if err := empty(filepath.Join(root, dir)); err != nil {
			return err
		}
	}
	for _, f := range []string{"etc/hostname", "var/cache/apt/pkgcache.bin", "var/cache/apt/srcpkgcache.bin", "etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap"} {
		if err := os.Remove(filepath.Join(root, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, dir := range []string{"etc", "dev", "proc", "run", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	// A sandbox brings its own, and a step has one mounted over it.
	return os.WriteFile(filepath.Join(root, "etc/resolv.conf"), nil, 0o644)
}

// empty removes what is in a folder that may be missing.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (b *builder) mmdebstrap(ctx context.Context, tmp string, args ...string) error {
	cmd := exec.CommandContext(ctx, "unshare", isolated("--mount-proc", "mmdebstrap", "--mode=root", "--format=directory", "--quiet")...)
	cmd.Args = append(cmd.Args, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "QUARRY_DEBS="+b.cfg.Debs, "QUARRY_LISTS="+b.lists())
	return run(cmd)
}

// The script that prepares a step's own mount namespace: what it mounts ends
// with it and never gets into a layer. $1 is the root, $2 the folder of the
// build, $3 the corpus, $4 the step's script.
const enter = `
cd "$1"
mount -t proc proc proc
mount --bind /dev dev
mount -t tmpfs tmp tmp
mount -t tmpfs run run
mkdir run/pip run/npm
mount --bind "$3/.pip" run/pip
mount --bind "$3/.npm" run/npm
mount --bind /etc/resolv.conf etc/resolv.conf
if [ -f /etc/ssl/certs/ca-certificates.crt ]; then
	cp /etc/ssl/certs/ca-certificates.crt run/ca.crt
fi
if [ -d var/lib/apt/lists ]; then
	mkdir -p "$2/lists" "$2/archives"
	cp -r "$3/.lists/." "$2/lists/"
	mount --bind "$2/lists" var/lib/apt/lists
	mount --bind "$2/archives" var/cache/apt/archives
fi
shell=/bin/sh
[ -e bin/sh ] || shell='/bin/busybox sh'
exec chroot . $shell -e -c "$4"
`

// aptInstall keeps what it downloads for copyNew. A container has no init, so
// nothing may start a service: policy-rc.d says so, as in Debian's own images.
const aptInstall = `
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 0755 /usr/sbin/policy-rc.d
apt-get install -qq --yes --no-install-recommends -o APT::Sandbox::User=root -o APT::Keep-Downloaded-Packages=true \
	-o Dpkg::Use-Pty=false -o Dpkg::Options::=--force-unsafe-io %s >/dev/null
rm -f /var/cache/apt/pkgcache.bin /var/cache/apt/srcpkgcache.bin
`

// step runs one step in the image.
func (b *builder) step(ctx context.Context, work, root string, s Step) error {
	for _, dir := range []string{".pip", ".npm"} {
		if err := os.MkdirAll(filepath.Join(b.cfg.Dir, dir), 0o755); err != nil {
			return err
		}
	}
	archives, script := filepath.Join(work, "archives"), s.Script
	if len(s.Packages) > 0 {
		if err := os.MkdirAll(archives, 0o755); err != nil {
			return err
		}
		if err := copyNew(b.cfg.Debs, archives, "*.deb"); err != nil {
			return err
		}
		script = fmt.Sprintf(aptInstall, strings.Join(s.Packages, " ")) + script
	}
	cmd := exec.CommandContext(ctx, "unshare", isolated("sh", "-e", "-c", enter, "sh", root, work, b.cfg.Dir, script)...)
	cmd.Env = stepEnv()
	if err := run(cmd); err != nil {
		return err
	}
	err := copyNew(archives, b.cfg.Debs, "*.deb")
	return errors.Join(err, os.RemoveAll(archives), os.RemoveAll(filepath.Join(work, "lists")))
}

// isolated are arguments of unshare(1) that end a command's processes and mounts
// with it, also when it is killed.
func isolated(args ...string) []string {
	return append([]string{"--mount", "--propagation=private", "--pid", "--fork", "--kill-child"}, args...)
}

// stepEnv is a clean environment, with the package indexes that the caller's
// clients use.
func stepEnv() []string {
	const ca = "/run/ca.crt"
	env := []string{
		path, "HOME=/root", "LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive",
		"SSL_CERT_FILE=" + ca, "NODE_EXTRA_CA_CERTS=" + ca, "npm_config_cafile=" + ca, "PIP_CERT=" + ca,
		"PIP_CACHE_DIR=/run/pip", "PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_ROOT_USER_ACTION=ignore", "PIP_DISABLE_PIP_VERSION_CHECK=1",
		"npm_config_cache=/run/npm", "npm_config_audit=false", "npm_config_fund=false", "npm_config_update_notifier=false",
	}
	for _, name := range []string{"PIP_INDEX_URL", "npm_config_registry", "http_proxy", "https_proxy", "no_proxy"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// run runs a command; an error has the end of what it printed.
func run(cmd *exec.Cmd) error {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		const tail = 4 << 10 // some forty lines
		text := out.Bytes()
		return fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, bytes.TrimSpace(text[max(0, len(text)-tail):]))
	}
	return nil
}
