package vm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"quarry/internal/proc"
)

// Suite is where a Debian kernel comes from: the one that the package
// linux-image-amd64 depends on there.
type Suite struct {
	Name    string   // of the folder in the cache
	Sources []string // suites, as the part of an apt source line after "deb"
}

// The kernels that quarry is shown to work on, besides this machine's.
var (
	Linux6_1  = Suite{"6.1", []string{debian + " bookworm main", debian + "-security bookworm-security main"}}
	Linux6_12 = Suite{"6.12", []string{debian + " bookworm-backports main"}}
)

const (
	debian  = "http://deb.debian.org/debian"
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	// metapackage depends on the newest kernel of its suite.
	metapackage = "linux-image-amd64"
	// unpackedImage is the ELF kernel in a kernel's folder.
	unpackedImage = "boot/vmlinux"
)

// Kernel is an unpacked Debian kernel.
type Kernel struct {
	Suite   string
	Release string // as uname -r says it
	image   string // the bzImage of the package
	base    string // holds lib/modules/<release> with its indexes
}

// Fetch returns a suite's kernel from the folder cache, where it downloads it
// first when it is not there. The machine's own apt is neither asked nor changed.
// Needs apt-get, dpkg and depmod.
func Fetch(ctx context.Context, cache string, s Suite) (*Kernel, error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	cache, err := filepath.Abs(cache)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, s.Name)
	lock, err := proc.TakeLock(ctx, dir+".lock")
	if err != nil {
		return nil, err
	}
	defer lock.Unlock()
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := s.download(ctx, dir); err != nil {
			return nil, fmt.Errorf("download kernel %s: %w", s.Name, err)
		}
	}
	k, err := open(dir)
	if err != nil {
		return nil, fmt.Errorf("kernel %s (remove %s to download it again): %w", s.Name, dir, err)
	}
	k.Suite = s.Name
	return k, nil
}

// download makes dir from the suite's kernel package, whole or not at all.
func (s Suite) download(ctx context.Context, dir string) error {
	work, err := os.MkdirTemp(filepath.Dir(dir), s.Name+".download")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	apt := privateApt{dir: filepath.Join(work, "apt")}
	if err := apt.init(s.Sources); err != nil {
		return err
	}
	if _, err := apt.run(ctx, "apt-get", "-q", "update"); err != nil {
		return err
	}
	depends, err := apt.run(ctx, "apt-cache", "depends", metapackage)
	if err != nil {
		return err
	}
	_, name, ok := strings.Cut(depends, "Depends: linux-image-")
	if !ok {
		return fmt.Errorf("%s depends on no kernel: %q", metapackage, depends)
	}
	name = "linux-image-" + strings.Fields(name)[0]
	if _, err := apt.run(ctx, "apt-get", "-q", "download", name); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(apt.dir, name+"_*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download %s left %q: %w", name, debs, err)
	}
	tree := filepath.Join(work, "tree")
	if _, err := output(exec.CommandContext(ctx, "dpkg", "-x", debs[0], tree)); err != nil {
		return err
	}
	k, err := open(tree)
	if err != nil {
		return err
	}
	if err := k.unpackImage(ctx); err != nil {
		return err
	}
	if _, err := output(exec.CommandContext(ctx, "depmod", "-b", tree, k.Release)); err != nil {
		return err
	}
	return os.Rename(tree, dir)
}

// Where Linux's boot protocol says what a bzImage has in it
// (Documentation/arch/x86/boot.rst).
const (
	setupSectorsOff  = 0x1f1 // one byte: sectors before the kernel, less one
	payloadOff       = 0x248 // uint32: of the packed kernel, after those sectors
	payloadLengthOff = 0x24c // uint32: its length, with 4 bytes behind the stream
	bzHeaderSize     = 0x250
)

// unpackImage puts the kernel that the bzImage unpacks when it boots beside it as
// boot/vmlinux: the host does that in a second, the guest in ten.
func (k *Kernel) unpackImage(ctx context.Context) error {
	raw, err := os.ReadFile(k.image)
	if err != nil {
		return err
	}
	if len(raw) < bzHeaderSize {
		return fmt.Errorf("%s is no bzImage", k.image)
	}
	from := (int(raw[setupSectorsOff])+1)*512 + int(binary.LittleEndian.Uint32(raw[payloadOff:]))
	to := from + int(binary.LittleEndian.Uint32(raw[payloadLengthOff:])) - 4
	if from >= to || to > len(raw) {
		return fmt.Errorf("%s is no bzImage: it says that the kernel is at %d to %d of %d bytes", k.image, from, to, len(raw))
	}
	unpack := "xz"
	if bytes.HasPrefix(raw[from:], []byte("\x28\xb5\x2f\xfd")) {
		unpack = "zstd"
	}
	cmd := exec.CommandContext(ctx, unpack, "-dc")
	cmd.Stdin = bytes.NewReader(raw[from:to])
	elf, err := output(cmd)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(k.base, unpackedImage), []byte(elf), 0o644)
}

// open finds the parts of an unpacked kernel package.
func open(tree string) (*Kernel, error) {
	found, err := filepath.Glob(filepath.Join(tree, "boot", "vmlinuz-*"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("%s/boot has the kernels %q, want one: %w", tree, found, err)
	}
	release := strings.TrimPrefix(filepath.Base(found[0]), "vmlinuz-")
	if _, err := os.Stat(filepath.Join(tree, "lib/modules", release)); err != nil {
		return nil, err
	}
	return &Kernel{Release: release, image: found[0], base: tree}, nil
}

// privateApt is an apt with state, cache and sources of its own in a folder.
type privateApt struct{ dir string }

func (a privateApt) init(sources []string) error {
	for _, sub := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, sub), 0o755); err != nil {
			return err
		}
	}
	var list strings.Builder
	for _, s := range sources {
		fmt.Fprintf(&list, "deb [arch=amd64 signed-by=%s] %s\n", keyring, s)
	}
	return os.WriteFile(filepath.Join(a.dir, "sources.list"), []byte(list.String()), 0o644)
}

// run calls a program of apt in the folder.
func (a privateApt) run(ctx context.Context, program string, args ...string) (string, error) {
	var options []string
	for _, o := range []string{
		"Dir::State=" + a.dir + "/state", "Dir::Cache=" + a.dir + "/cache", "Dir::State::status=/var/lib/dpkg/status",
		"Dir::Etc::SourceList=" + a.dir + "/sources.list", "Dir::Etc::SourceParts=/dev/null",
		// The folder is root's, below folders that may be closed to others.
		"APT::Sandbox::User=root",
		"APT::Architecture=amd64", "Acquire::Languages=none",
	} {
		options = append(options, "-o", o)
	}
	cmd := exec.CommandContext(ctx, program, append(options, args...)...)
	cmd.Dir = a.dir
	return output(cmd)
}

// output runs a command and returns its stdout; an error has what it printed.
func output(cmd *exec.Cmd) (string, error) {
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s%s", strings.Join(cmd.Args, " "), err, out.String(), errOut.String())
	}
	return out.String(), nil
}
