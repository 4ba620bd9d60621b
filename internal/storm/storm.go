// Package storm runs processes that read files all the time and compare every
// byte, while a test kills what serves the files. They are processes of their own
// because that is what users of a mount are: none of them may fail, or hang.
package storm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// envManifest makes a program that calls Main a reader of the files that the
// manifest of this name lists.
const envManifest = "QUARRY_STORM_MANIFEST"

// Verdict is what readers found.
type Verdict struct {
	Files  int             // read to the end and compared
	Reads  int             // read(2) calls
	Failed []string        // reads that failed, and files with wrong bytes
	Waits  []time.Duration // the longest of the reads, sorted
}

// keptWaits is of one reader: of its reads, the longest.
const keptWaits = 1000

// Longest returns the time that one read in n exceeded, and not more. n is so
// large that the readers have kept it: at least Reads/keptWaits.
func (v Verdict) Longest(n int) time.Duration {
	if len(v.Waits) == 0 {
		return 0
	}
	return v.Waits[max(len(v.Waits)-1-v.Reads/n, 0)]
}

// Main is called first of all by a program that calls Start: in a reader's
// process it does the work and does not return.
func Main() {
	manifest := os.Getenv(envManifest)
	if manifest == "" {
		return
	}
	if err := read(manifest); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// read reads and compares until the process's input ends.
func read(manifest string) error {
	raw, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	stop := make(chan struct{})
	go func() { // ends with the input
		io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	fmt.Println("reading")
	var v Verdict
	for i := os.Getpid(); ; i++ {
		select {
		case <-stop:
			return json.NewEncoder(os.Stdout).Encode(v)
		default:
		}
		want, name, _ := strings.Cut(lines[i%len(lines)], " ")
		if err := v.compare(name, want); err != nil {
			v.Failed = append(v.Failed, err.Error())
		}
	}
}

// compare reads a file past the page cache.
func (v *Verdict) compare(name, want string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return err
	}
	h := sha256.New()
	p := make([]byte, 64<<10)
	for {
		start := time.Now()
		n, err := f.Read(p)
		v.note(time.Since(start))
		h.Write(p[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	if got := fmt.Sprintf("%x", h.Sum(nil)); got != want {
		return fmt.Errorf("%s has wrong bytes", name)
	}
	v.Files++
	return nil
}

func (v *Verdict) note(d time.Duration) {
	v.Reads++
	v.Waits = append(v.Waits, d)
	if len(v.Waits) >= 2*keptWaits {
		slices.Sort(v.Waits)
		v.Waits = slices.Delete(v.Waits, 0, len(v.Waits)-keptWaits)
	}
}

// Manifest writes the manifest of all regular files below want, which are read
// below at.
func Manifest(path, want, at string) error {
	var list bytes.Buffer
	err := filepath.WalkDir(want, func(p string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		raw, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(want, p)
		if err != nil || strings.Contains(rel, "\n") {
			return err
		}
		fmt.Fprintf(&list, "%x %s\n", sha256.Sum256(raw), filepath.Join(at, rel))
		return nil
	})
	if err != nil {
		return err
	}
	return os.WriteFile(path, list.Bytes(), 0o600)
}

// Readers are processes that read.
type Readers struct {
	cmds []*exec.Cmd
	ins  []io.Closer
	outs []*bufio.Reader
}

// Start starts n of them, which end with ctx at the latest.
func Start(ctx context.Context, n int, manifest string) (*Readers, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r := &Readers{}
	for range n {
		if err := r.start(ctx, self, manifest); err != nil {
			_, endErr := r.End()
			return nil, fmt.Errorf("start a reading process: %w (%w)", err, endErr)
		}
	}
	return r, nil
}

func (r *Readers) start(ctx context.Context, self, manifest string) error {
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), envManifest+"="+manifest)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	b := bufio.NewReader(out)
	r.cmds, r.ins, r.outs = append(r.cmds, cmd), append(r.ins, in), append(r.outs, b)
	if line, err := b.ReadString('\n'); line != "reading\n" {
		return fmt.Errorf("it says %q (%w)", line, err)
	}
	return nil
}

// End ends them, each after the file that it is at, and returns what all of them
// found.
func (r *Readers) End() (sum Verdict, err error) {
	for i, cmd := range r.cmds {
		r.ins[i].Close()
		var v Verdict
		decodeErr := json.NewDecoder(r.outs[i]).Decode(&v)
		if waitErr := cmd.Wait(); err == nil && (decodeErr != nil || waitErr != nil) {
			err = fmt.Errorf("reading process: %w, verdict: %w", waitErr, decodeErr)
		}
		sum.Files += v.Files
		sum.Reads += v.Reads
		sum.Failed = append(sum.Failed, v.Failed...)
		sum.Waits = append(sum.Waits, v.Waits...)
	}
	slices.Sort(sum.Waits)
	return sum, err
}
