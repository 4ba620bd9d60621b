// Package lab drives the built programs as a user would: it starts servers,
// runs commands and reads their figures. The demo and the benchmark share it, so
// that they measure one thing the same way.
package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Lab is a working folder with the built programs.
type Lab struct {
	Dir string // everything made here is below it; Close removes it
	bin string
}

// New makes a lab. The programs are those in $QUARRY_BIN, which make sets.
func New() (*Lab, error) {
	bin := os.Getenv("QUARRY_BIN")
	if _, err := os.Stat(filepath.Join(bin, "quarry")); err != nil || bin == "" {
		return nil, fmt.Errorf("QUARRY_BIN=%q holds no built quarry: run this through make", bin)
	}
	dir, err := os.MkdirTemp("", "quarry-lab")
	if err != nil {
		return nil, err
	}
	return &Lab{Dir: dir, bin: bin}, nil
}

// Path names a file or folder of the lab.
func (l *Lab) Path(elem ...string) string {
	return filepath.Join(append([]string{l.Dir}, elem...)...)
}

// Close ends the background processes that work in the lab, which would end by
// themselves in ten seconds, and removes it.
func (l *Lab) Close() error {
	if err := l.EndBelow(l.Dir); err != nil {
		return err
	}
	var err error
	for range 1200 { // a minute
		if err = os.RemoveAll(l.Dir); err == nil {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return err
}

// EndBelow ends every process that has the folder in its arguments, or a file
// Below it, and waits until none is left.
func (l *Lab) EndBelow(dir string) error {
	for range 1200 { // a minute
		pids, err := Below(dir)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGTERM)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("the processes that work in %s do not end", dir)
}

// Below lists the processes that name a folder. A zombie names nothing.
func Below(dir string) ([]int, error) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, p := range procs {
		args, err := os.ReadFile(filepath.Join("/proc", p.Name(), "cmdline"))
		pid, numErr := strconv.Atoi(p.Name())
		if err != nil || numErr != nil || pid == os.Getpid() {
			continue
		}
		args = append(args, 0)
		if bytes.Contains(args, []byte(dir+"/")) || bytes.Contains(args, []byte(dir+"\x00")) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Command prepares a call of quarry.
func (l *Lab) Command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, filepath.Join(l.bin, "quarry"), args...)
}

// Quarry runs quarry and returns its stdout; an error has its stderr.
func (l *Lab) Quarry(ctx context.Context, args ...string) (string, error) {
	var out, errOut bytes.Buffer
	cmd := l.Command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("quarry %s: %w: %s", strings.Join(args, " "), err, errOut.String())
	}
	return out.String(), nil
}

// Result is what convert --json prints.
type Result struct {
	Source         string `json:"source"`
	Layers         int    `json:"layers"`
	LayersSkipped  int    `json:"layers_skipped"`
	PlainBytes     int64  `json:"plain_bytes"`
	NewPlainBytes  int64  `json:"new_plain_bytes"`
	NewStoredBytes int64  `json:"new_stored_bytes"`
}

// Convert converts an image into a data folder.
func (l *Lab) Convert(ctx context.Context, data, source, name string) (Result, error) {
	out, err := l.Quarry(ctx, "convert", "--data", data, "--name", name, "--json", source)
	if err != nil {
		return Result{}, err
	}
	var doc struct{ Result Result }
	line, _, _ := strings.Cut(out, "\n")
	return doc.Result, json.Unmarshal([]byte(line), &doc)
}

// Stats is the part of a --stats file that the lab uses.
type Stats struct {
	ImageSizeBytes    int64   `json:"image_size_bytes"`
	WireBytes         int64   `json:"wire_bytes"`
	Requests          int64   `json:"requests"`
	ChunkPlainBytes   int64   `json:"chunk_plain_bytes"`
	DeviceBytes       int64   `json:"device_bytes"`
	FirstOutputMillis float64 `json:"first_output_ms"`
	DurationMillis    float64 `json:"duration_ms"`
	ExitStatus        int     `json:"exit_status"`
	FailedReads       int64   `json:"failed_reads"`
}

// Run runs a command in an image and returns its stdout and what it cost. flags
// go before the image.
func (l *Lab) Run(ctx context.Context, flags []string, image string, args ...string) (string, Stats, error) {
	file, err := os.CreateTemp(l.Dir, "stats")
	if err != nil {
		return "", Stats{}, err
	}
	file.Close()
	all := append([]string{"run", "--stats", file.Name()}, flags...)
	out, err := l.Quarry(ctx, append(append(all, image), args...)...)
	if err != nil {
		return out, Stats{}, err
	}
	raw, err := os.ReadFile(file.Name())
	if err != nil {
		return out, Stats{}, err
	}
	var st Stats
	return out, st, json.Unmarshal(raw, &st)
}

// Server is a running quarry serve.
type Server struct {
	URL string
	cmd *exec.Cmd
}

// Serve starts quarry serve on a free port and waits until it listens. Without flags
// it asks nobody for a token.
func (l *Lab) Serve(ctx context.Context, data string, flags ...string) (*Server, error) {
	if len(flags) == 0 {
		flags = []string{"--no-auth"}
	}
	cmd := l.Command(ctx, append([]string{"serve", "--data", data, "--listen", "127.0.0.1:0"}, flags...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	logFile, err := os.Create(l.Path("serve.log"))
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	cmd.Stderr = logFile
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		cmd.Process.Kill()
		return nil, fmt.Errorf("quarry serve did not start (%w), see %s", errors.Join(err, cmd.Wait()), logFile.Name())
	}
	return &Server{URL: url, cmd: cmd}, nil
}

// Stop ends the server and fails when it does not exit 0.
func (s *Server) Stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return s.cmd.Wait()
}

// Addr is the server's host and port.
func (s *Server) Addr() string { return strings.TrimPrefix(s.URL, "http://") }

// Metric returns the value of one series of /metrics, as it is written there. One with
// labels that is not there is 0.
func (s *Server) Metric(ctx context.Context, series string) (float64, error) {
	rq, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(rq)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("GET /metrics: %s (%w)", res.Status, err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	if !strings.Contains(series, "{") {
		return 0, fmt.Errorf("GET /metrics: there is no %s", series)
	}
	return 0, nil
}

// Alive reports whether neither Stop nor Kill has ended the server.
func (s *Server) Alive() bool { return s.cmd.ProcessState == nil }

// Kill ends the server at once, as a crash does.
func (s *Server) Kill() error {
	if err := s.cmd.Process.Kill(); err != nil {
		return err
	}
	s.cmd.Wait()
	return nil
}

// Find lists the processes that have all of the words among their arguments.
func Find(words ...string) ([]int, error) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, p := range procs {
		raw, err := os.ReadFile(filepath.Join("/proc", p.Name(), "cmdline"))
		pid, numErr := strconv.Atoi(p.Name())
		if err != nil || numErr != nil || pid == os.Getpid() {
			continue
		}
		args := strings.Split(string(raw), "\x00")
		if !slices.ContainsFunc(words, func(w string) bool { return !slices.Contains(args, w) }) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// DebianImages returns the OCI layouts of the two builds of the Debian image.
func DebianImages() (first, second string, err error) { return layouts("debian") }

// ColdImages returns those of the image for cold starts.
func ColdImages() (first, second string, err error) { return layouts("cold") }

func layouts(name string) (first, second string, err error) {
	dir := os.Getenv("QUARRY_IMAGES")
	first, second = filepath.Join(dir, name), filepath.Join(dir, name+"-again")
	for _, layout := range []string{first, second} {
		if _, err := os.Stat(filepath.Join(layout, "index.json")); err != nil {
			return "", "", fmt.Errorf("no %s image (QUARRY_IMAGES=%q): run make images: %w", name, dir, err)
		}
	}
	return first, second, nil
}

// PeakMemory returns the largest resident size so far of the server that owns
// the data folder, in bytes.
func (l *Lab) PeakMemory(data string) (int64, error) {
	pid, err := owner(data)
	if err != nil {
		return 0, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("process %d has no VmHWM", pid)
}

// ProcessorTime returns what the server that owns the data folder has taken of processors
// so far, in the kernel too; the kernel tells it in steps of 10 ms.
func (l *Lab) ProcessorTime(data string) (time.Duration, error) {
	pid, err := owner(data)
	if err != nil {
		return 0, err
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may have anything in it; user and system time are the
	// 14th and 15th field.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("process %d has no times in %q", pid, stat)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	system, serr := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err, serr)
}

// StopOwner ends the background process that has the data folder open, which
// would end by itself in ten seconds.
func (l *Lab) StopOwner(data string) error {
	pid, err := owner(data)
	if err != nil {
		return err
	}
	for range 1000 { // 50 s: what a server has to drain and to close
		if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err != nil || len(args) == 0 {
			return nil // a zombie has no arguments any more
		}
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("process %d, which has %s open, does not end", pid, data)
}

// owner returns the process that has the data folder open.
func owner(data string) (pid int, err error) {
	raw, err := os.ReadFile(filepath.Join(data, "lock"))
	if err != nil {
		return 0, err
	}
	var holder struct{ PID int }
	return holder.PID, json.Unmarshal(raw, &holder)
}
