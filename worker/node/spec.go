package node

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"

	"quarry/store/chunk"
	"quarry/worker/sandbox"
)

// Bounds of a Spec.
const (
	maxRef       = 1 << 10
	maxEnv       = 1024
	maxEnvBytes  = 512 << 10
	maxArgs      = 1024
	maxArgsBytes = 128 << 10
	maxLabels    = 64
	maxLabel     = 256 // bytes of a key or value
	maxGroup     = 256
	maxKey       = 256
	maxShares    = 32
	maxRules     = 256
	maxPath      = 4096
	minMemoryMB  = 64 // what the Sentry alone may take
	minPIDs      = 8
	maxSeconds   = 10 * 366 * 24 * 3600
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", sandbox.ErrInvalid, fmt.Sprintf(format, args...))
}

// bodyDigest is what tells two specs with one idempotency key apart.
func bodyDigest(s sandbox.Spec) (chunk.Digest, error) {
	raw, err := json.Marshal(s)
	if err != nil {
		return chunk.Digest{}, invalid("%v", err)
	}
	return sha256.Sum256(raw), nil
}

var hostname = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)

// checked returns the spec with the node's defaults in the place of what it does not
// say.
func (n *Node) checked(s sandbox.Spec) (sandbox.Spec, error) {
	if s.Image == "" || len(s.Image) > maxRef {
		return s, invalid("image: want a reference of at most %d bytes", maxRef)
	}
	if s.Hostname == "" {
		s.Hostname = "sandbox"
	}
	if !hostname.MatchString(s.Hostname) {
		return s, invalid("hostname %q: want letters, digits and hyphens, at most 63", s.Hostname)
	}
	if s.Role == "" {
		s.Role = sandbox.RoleRollout
	}
	if s.Role != sandbox.RoleRollout && s.Role != sandbox.RoleGrade {
		return s, invalid("role %q: want %s or %s", s.Role, sandbox.RoleRollout, sandbox.RoleGrade)
	}
	if err := n.checkSizes(&s); err != nil {
		return s, err
	}
	if err := checkTexts(s); err != nil {
		return s, err
	}
	if len(s.Network.Allow) > maxRules {
		return s, invalid("network: %d rules, at most %d", len(s.Network.Allow), maxRules)
	}
	if n.c.Network == nil && len(s.Network.Allow) > 0 {
		return s, fmt.Errorf("%w: its worker gives sandboxes no network: leave network.allow out, or start it without --no-network", sandbox.ErrUnsupported)
	}
	if len(s.Shares) > maxShares {
		return s, invalid("shares: %d, at most %d", len(s.Shares), maxShares)
	}
	targets := map[string]bool{}
	for _, sh := range s.Shares {
		if err := n.checkShare(sh); err != nil {
			return s, err
		}
		if targets[sh.Target] {
			return s, invalid("shares: two have the target %s", sh.Target)
		}
		targets[sh.Target] = true
	}
	return s, nil
}

// checkSizes fills in the defaults of numbers and holds them against their bounds.
func (n *Node) checkSizes(s *sandbox.Spec) error {
	for _, v := range []struct {
		name          string
		p             *int64
		def, low, top int64
	}{
		{"cpu_milli", &s.CPUMilli, n.c.Default.CPUMilli, 10, n.c.Max.CPUMilli},
		{"memory_mb", &s.MemoryMB, n.c.Default.MemoryMB, minMemoryMB, n.c.Max.MemoryMB},
		{"disk_mb", &s.DiskMB, n.c.Default.DiskMB, 1, n.c.Max.DiskMB},
		{"output_mb", &s.OutputMB, n.outputOf(s.DiskMB), 1, n.c.Max.OutputMB},
		{"pids", &s.PIDs, n.c.Default.PIDs, minPIDs, n.c.Max.PIDs},
	} {
		if *v.p == 0 {
			*v.p = v.def
		}
		if *v.p < v.low || *v.p > v.top {
			return invalid("%s %d: want %d to %d", v.name, *v.p, v.low, v.top)
		}
	}
	if s.MemoryRequest == 0 {
		s.MemoryRequest = s.MemoryMB
	}
	if s.MemoryRequest < 1 || s.MemoryRequest > s.MemoryMB {
		return invalid("memory_request_mb %d: want 1 to memory_mb, which is %d", s.MemoryRequest, s.MemoryMB)
	}
	if err := n.idlePause(s); err != nil {
		return err
	}
	if s.TTL == 0 {
		s.TTL = int64(n.c.Default.TTL.Seconds())
	}
	if s.TTL < 0 || s.TTL > maxSeconds || s.Idle < 0 || s.Idle > maxSeconds {
		return invalid("ttl_s %d, idle_s %d: want 0 to %d", s.TTL, s.Idle, maxSeconds)
	}
	if top := int64(n.c.Max.TTL.Seconds()); top > 0 && s.TTL > top {
		return invalid("ttl_s %d: at most %d", s.TTL, top)
	}
	return nil
}

// minOutputMB is what a sandbox may keep of output, however small its disk is.
const minOutputMB = 16

// outputOf is what is kept of the output of a sandbox with a disk that does not say.
func (n *Node) outputOf(diskMB int64) int64 {
	return min(n.c.Default.OutputMB, max(minOutputMB, cmp.Or(diskMB, n.c.Default.DiskMB)/4))
}

func checkTexts(s sandbox.Spec) error {
	if err := checkList("env", s.Env, maxEnv, maxEnvBytes); err != nil {
		return err
	}
	for _, kv := range s.Env {
		if name, _, ok := strings.Cut(kv, "="); !ok || name == "" {
			return invalid("env %q: want NAME=VALUE", kv)
		}
	}
	if err := checkList("entrypoint", s.Entrypoint, maxArgs, maxArgsBytes); err != nil {
		return err
	}
	if len(s.Entrypoint) > 0 && s.Entrypoint[0] == "" {
		return invalid("entrypoint: its first word names the program")
	}
	if err := checkList("user and workdir", []string{s.User, s.WorkDir}, 2, maxPath); err != nil {
		return err
	}
	if err := checkList("group", []string{s.Group}, 1, maxGroup); err != nil {
		return err
	}
	if len(s.Labels) > maxLabels {
		return invalid("labels: %d, at most %d", len(s.Labels), maxLabels)
	}
	for k, v := range s.Labels {
		if k == "" || len(k) > maxLabel || len(v) > maxLabel {
			return invalid("label %q: want a name, and at most %d bytes of name and value", k, maxLabel)
		}
		if err := checkList("label", []string{k, v}, 2, 2*maxLabel); err != nil {
			return err
		}
	}
	return nil
}

// checkList refuses what JSON could only pass on changed, and what is too much.
func checkList(what string, list []string, count, size int) error {
	if len(list) > count {
		return invalid("%s: %d, at most %d", what, len(list), count)
	}
	total := 0
	for _, s := range list {
		total += len(s)
		if !utf8.ValidString(s) || strings.Contains(s, "\x00") {
			return invalid("%s %q: only UTF-8 without NUL can be given to a sandbox", what, s)
		}
	}
	if total > size {
		return invalid("%s: %d bytes, at most %d", what, total, size)
	}
	return nil
}

// own are folders of the guest that the Sentry fills, and that no share may cover.
var own = []string{"/proc", "/sys", "/dev"}

// checkShare holds the text of a share against what can be one.
func (n *Node) checkShare(s sandbox.Share) error {
	if err := checkList("share", []string{s.Name, s.Target}, 2, 2*maxPath); err != nil {
		return err
	}
	if !path.IsAbs(s.Target) || path.Clean(s.Target) != s.Target || s.Target == "/" || len(s.Target) > maxPath {
		return invalid("share target %q: want an absolute path of at most %d bytes, without . and ..", s.Target, maxPath)
	}
	for _, o := range own {
		if s.Target == o || strings.HasPrefix(s.Target, o+"/") {
			return invalid("share target %q: %s is the sandbox's own", s.Target, o)
		}
	}
	share, _, _ := strings.Cut(s.Name, "/")
	if _, ok := n.c.Shares[share]; !ok {
		return fmt.Errorf("share %q: %w: start the worker with --share %s=FOLDER, or name one that it has", s.Name, sandbox.ErrShare, share)
	}
	return nil
}
