package client_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/api/access"
	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// growing begins the path of a file that has more than it said.
const growing = "/growing"

// fakeNode keeps files and execs in memory. Methods that no test here needs are the
// nil interface's.
type fakeNode struct {
	sandbox.Node
	mu      sync.Mutex
	changed chan struct{}
	exec    sandbox.ExecState
	out     []byte
	killed  bool
	files   map[string][]byte
	err     error
}

func newFake() *fakeNode {
	return &fakeNode{changed: make(chan struct{}), files: map[string][]byte{}}
}

func (n *fakeNode) change(fn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	fn()
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *fakeNode) Authorize(_ context.Context, id, token string) bool {
	return token == "qsb_"+id+"_right"
}

func (n *fakeNode) Create(_ context.Context, s sandbox.Spec, key string) (sandbox.Sandbox, bool, error) {
	return sandbox.Sandbox{ID: "s1", Image: s.Image, State: sandbox.StateRunning}, key != "again", n.err
}

func (n *fakeNode) Get(_ context.Context, id string) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{ID: id}, n.err
}

func (n *fakeNode) List(_ context.Context, f sandbox.Filter) ([]sandbox.Sandbox, string, error) {
	if f.After == "" {
		return []sandbox.Sandbox{{ID: "a", Labels: f.Labels}}, "a", nil
	}
	return []sandbox.Sandbox{{ID: "b"}}, "", nil
}

func (n *fakeNode) Exec(_ context.Context, _ string, e sandbox.ExecSpec) (sandbox.ExecState, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.exec.ID = e.ID
	return n.exec, n.err
}

func (n *fakeNode) WaitExec(ctx context.Context, _, exec string, out, _ int64) (sandbox.ExecState, error) {
	for {
		n.mu.Lock()
		st, changed := n.exec, n.changed
		n.mu.Unlock()
		if st.ID != exec {
			return st, sandbox.ErrExecUnknown
		}
		if st.State == sandbox.ExecExited || st.Stdout.Kept > out {
			return st, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return st, nil
		}
	}
}

func (n *fakeNode) Output(_ context.Context, _, _, stream string, offset int64, w io.Writer) (int64, error) {
	n.mu.Lock()
	out := bytes.Clone(n.out)
	n.mu.Unlock()
	if stream != "stdout" {
		return 0, nil
	}
	m, err := w.Write(out[offset:])
	return int64(m), err
}

func (n *fakeNode) Signal(context.Context, string, string, int) error {
	n.change(func() { n.killed = true })
	return nil
}

func (n *fakeNode) print(text string, end bool) {
	n.change(func() {
		n.out = append(n.out, text...)
		n.exec.State, n.exec.Stdout.Kept = sandbox.ExecRunning, int64(len(n.out))
		if end {
			code := 3
			n.exec.State, n.exec.ExitCode, n.exec.Stdout.Closed = sandbox.ExecExited, &code, true
		}
	})
}

func (n *fakeNode) ReadFile(_ context.Context, _, path string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	b, ok := n.files[path]
	if !ok {
		return sandbox.ErrFileNotFound
	}
	if err := begin(sandbox.FileInfo{Path: path, Size: int64(len(b))}); err != nil {
		return err
	}
	off, size := o.Part(int64(len(b)))
	if size == 0 {
		b = nil
	} else {
		b = b[off:][:size]
	}
	if strings.HasPrefix(path, growing) {
		b = append(bytes.Clone(b), 'x')
	}
	_, err := w.Write(b)
	return err
}

func (n *fakeNode) WriteFile(_ context.Context, _, path string, _ sandbox.WriteOptions, r io.Reader) (sandbox.FileInfo, error) {
	if n.err != nil {
		return sandbox.FileInfo{}, n.err
	}
	b, err := io.ReadAll(r)
	n.files[path] = b
	return sandbox.FileInfo{Path: path, Size: int64(len(b))}, err
}

func (n *fakeNode) Events(ctx context.Context, after uint64, _ string, fn func(sandbox.Event) error) error {
	for i := range uint64(3) {
		if err := fn(sandbox.Event{Sequence: after + i + 1, Type: "running"}); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// serve starts a worker over n, whose tokens of scope run are "run", and returns its URL.
func serve(t *testing.T, n sandbox.Node) string {
	t.Helper()
	authorize := func(r *http.Request, need access.Scope, _ string) error {
		if r.Header.Get("Authorization") != "Bearer "+string(need) {
			return fmt.Errorf("%w: need %s", access.ErrForbidden, need)
		}
		return nil
	}
	h := sandboxes.NewHandler(sandboxes.Config{Node: n, Authorize: authorize, Pulse: 5 * time.Millisecond})
	srv := httptest.NewUnstartedServer(h)
	srv.Config = sandboxes.NewServer(h)
	srv.Start()
	t.Cleanup(func() { h.Stop(); srv.Close() })
	return srv.URL
}

func connect(t *testing.T, n sandbox.Node, token string) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{URL: serve(t, n), Token: token})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestATokenIsGoodForWhatItSays(t *testing.T) {
	n := newFake()
	url := serve(t, n)
	for token, want := range map[string]struct{ list, get, other, drain error }{
		"run":          {nil, nil, nil, access.ErrForbidden},
		"qsb_s1_right": {access.ErrForbidden, nil, access.ErrUnauthenticated, access.ErrForbidden},
		"qsb_s1_wrong": {access.ErrForbidden, access.ErrUnauthenticated, access.ErrUnauthenticated, access.ErrForbidden},
		"":             {access.ErrForbidden, access.ErrForbidden, access.ErrForbidden, access.ErrForbidden},
	} {
		c, err := client.New(client.Config{URL: url, Token: token})
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, err, want error) {
			if !errors.Is(err, want) || want == nil && err != nil {
				t.Errorf("token %q: %s: got %v, want %v", token, what, err, want)
			}
		}
		_, err = c.List(t.Context(), sandbox.Filter{})
		check("list", err, want.list)
		_, err = c.Get(t.Context(), "s1")
		check("get", err, want.get)
		_, err = c.Get(t.Context(), "s2")
		check("get of another", err, want.other)
		_, err = c.Drain(t.Context(), false)
		check("drain", err, want.drain)
	}
}

func TestAListIsReadToItsEnd(t *testing.T) {
	got, err := connect(t, newFake(), "run").List(t.Context(), sandbox.Filter{Labels: map[string]string{"k": "a=b"}})
	if err != nil || len(got) != 2 || got[0].Labels["k"] != "a=b" || got[1].ID != "b" {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestRefusalsKeepTheirMeaning(t *testing.T) {
	n := newFake()
	c := connect(t, n, "run")
	n.err = &sandbox.Busy{Err: sandbox.ErrCapacity, What: "memory", RetryAfter: 1500 * time.Millisecond}
	_, err := c.Create(t.Context(), sandbox.Spec{Image: "x"}, "k")
	var e *sandboxes.Error
	if !errors.Is(err, sandbox.ErrCapacity) || !errors.As(err, &e) || e.RetryAfter != 2*time.Second || !e.Retryable || e.RequestID == "" {
		t.Errorf("got %#v", err)
	}
	n.err = &sandbox.Busy{Err: sandbox.ErrNotReady, What: "a tool exec runs", RetryAfter: time.Second}
	_, err = c.Get(t.Context(), "s1")
	if !errors.Is(err, sandbox.ErrNotReady) || !errors.As(err, &e) || e.Status != http.StatusConflict || e.RetryAfter != time.Second || !e.Retryable {
		t.Errorf("got %#v", err)
	}
	n.err = &sandbox.EndedError{ID: "s1", End: sandbox.End{Reason: sandbox.ReasonOOM, Blame: sandbox.BlameAgent}}
	_, err = c.Get(t.Context(), "s1")
	var ended *sandbox.EndedError
	if !errors.Is(err, sandbox.ErrEnded) || !errors.As(err, &ended) || ended.End.Reason != sandbox.ReasonOOM || !errors.As(err, &e) || e.Status != http.StatusGone {
		t.Errorf("got %#v", err)
	}
}

func TestAnExecIsWaitedForAndItsOutputComesWithIt(t *testing.T) {
	n := newFake()
	c := connect(t, n, "run")
	go func() { // ends with the answer below
		for !n.started() {
			time.Sleep(time.Millisecond)
		}
		n.print("one\x00\xff", false)
		n.print("two", true)
	}()
	a, err := c.Exec(t.Context(), "s1", sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "e1", Argv: []string{"x"}}})
	if err != nil || string(a.Out) != "one\x00\xfftwo" || *a.ExitCode != 3 || a.More {
		t.Errorf("got %+v, %v", a, err)
	}
}

func (n *fakeNode) started() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.exec.ID != ""
}

func (n *fakeNode) wasKilled() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.killed
}

func TestAStreamIsTakenUpAgain(t *testing.T) {
	n := newFake()
	c := connect(t, n, "run")
	n.exec.ID = "e1"
	big := make([]byte, 600_000)
	rand.Read(big)
	n.print(string(big), false)
	var got bytes.Buffer
	var out, errOff int64
	ctx, cancel := context.WithCancel(t.Context())
	_, err := c.Follow(ctx, "s1", "e1", &out, &errOff, writerFunc(func(p []byte) (int, error) {
		defer cancel()
		return got.Write(p)
	}), io.Discard)
	if err == nil {
		t.Fatal("a stream that was given up ended well")
	}
	n.print("the rest", true)
	st, err := c.Follow(t.Context(), "s1", "e1", &out, &errOff, &got, io.Discard)
	if err != nil || *st.ExitCode != 3 || !bytes.Equal(got.Bytes(), append(big, "the rest"...)) {
		t.Errorf("got %d bytes, %+v, %v", got.Len(), st, err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestACommandIsEndedWithItsClientWhenThatWasAsked(t *testing.T) {
	for _, kill := range []bool{false, true} {
		n := newFake()
		c := connect(t, n, "run")
		ctx, cancel := context.WithCancel(t.Context())
		go func() { // ends with the command
			for !n.started() {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		_, err := c.Exec(ctx, "s1", sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "e1"}, KillOnDisconnect: kill})
		if err == nil {
			t.Fatal("an exec that was given up was answered")
		}
		for end := time.Now().Add(time.Minute); kill && !n.wasKilled(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the command goes on")
			}
		}
	}
}

func TestFilesCrossByteForByte(t *testing.T) {
	n := newFake()
	c := connect(t, n, "run")
	for _, size := range []int{0, 1, 65537, sandboxes.MaxHashed, sandboxes.MaxHashed + 1} {
		want := make([]byte, size)
		rand.Read(want)
		path := fmt.Sprintf("/a b\n%d", size)
		if _, err := c.WriteFile(t.Context(), "s1", path, sandbox.WriteOptions{Size: int64(size)}, bytes.NewReader(want)); err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		fi, err := c.ReadFile(t.Context(), "s1", path, sandbox.ReadOptions{Length: -1}, &got)
		if err != nil || fi.Path != path || !bytes.Equal(got.Bytes(), want) {
			t.Errorf("%d bytes: got %d, %+v, %v", size, got.Len(), fi, err)
		}
		if size < 2 {
			continue
		}
		got.Reset()
		if _, err := c.ReadFile(t.Context(), "s1", path, sandbox.ReadOptions{Offset: 1, Length: int64(size) - 2}, &got); err != nil || !bytes.Equal(got.Bytes(), want[1:size-1]) {
			t.Errorf("a range of %d bytes: got %d, %v", size, got.Len(), err)
		}
		got.Reset()
		if _, err := c.ReadFile(t.Context(), "s1", path, sandbox.ReadOptions{Offset: -2, Length: -1}, &got); err != nil || !bytes.Equal(got.Bytes(), want[size-2:]) {
			t.Errorf("the end of %d bytes: got %d, %v", size, got.Len(), err)
		}
		n.files[growing+path] = want
		if _, err := c.ReadFile(t.Context(), "s1", growing+path, sandbox.ReadOptions{Length: -1}, io.Discard); err == nil {
			t.Errorf("a file of %d bytes that grows under the reader is read without an error", size)
		}
	}
	if _, err := c.ReadFile(t.Context(), "s1", "/none", sandbox.ReadOptions{Length: -1}, io.Discard); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Errorf("got %v", err)
	}
}

func TestEventsAreTold(t *testing.T) {
	c := connect(t, newFake(), "run")
	enough := errors.New("enough")
	last := uint64(0)
	err := c.Events(t.Context(), 7, "", func(e sandbox.Event) error {
		if last = e.Sequence; last == 10 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || last != 10 {
		t.Errorf("got %d, %v", last, err)
	}
}

func TestRequestsAreRefusedByType(t *testing.T) {
	url := serve(t, newFake())
	for name, tt := range map[string]struct {
		method, path, body string
		status             int
		code               string
	}{
		"unknown route":          {"GET", "/v1/nothing", "", 404, "no_route"},
		"another method":         {"PATCH", "/v1/sandboxes", "", 405, "method_not_allowed"},
		"unknown field":          {"POST", "/v1/sandboxes", `{"imag":"x"}`, 400, "invalid_argument"},
		"a field in other case":  {"POST", "/v1/sandboxes", `{"Image":"x"}`, 400, "invalid_argument"},
		"a field twice":          {"POST", "/v1/sandboxes", `{"image":"x","image":"x"}`, 400, "invalid_argument"},
		"a label twice":          {"POST", "/v1/sandboxes", `{"image":"x","labels":{"a":"1","a":"2"}}`, 400, "invalid_argument"},
		"half a character":       {"POST", "/v1/sandboxes", `{"image":"\ud800"}`, 400, "invalid_argument"},
		"an exec's in a case":    {"POST", "/v1/sandboxes/s/exec", `{"exec_id":"e","ARGV":["x"]}`, 400, "invalid_argument"},
		"two documents":          {"POST", "/v1/sandboxes", `{} {}`, 400, "invalid_argument"},
		"no JSON":                {"POST", "/v1/sandboxes", `x`, 400, "invalid_argument"},
		"a body beyond all":      {"POST", "/v1/sandboxes", `{"image":"` + strings.Repeat("a", sandboxes.MaxBody) + `"}`, 413, "payload_too_large"},
		"id that is a path":      {"GET", "/v1/sandboxes/..", "", 404, "not_found"},
		"escaped id":             {"GET", "/v1/sandboxes/a%2fb", "", 404, "not_found"},
		"no id":                  {"POST", "/v1/sandboxes//exec", "{}", 404, "not_found"},
		"escaped exec":           {"GET", "/v1/sandboxes/s/exec/a%2fb", "", 404, "exec_not_found"},
		"unknown parameter":      {"GET", "/v1/sandboxes?x=1", "", 400, "invalid_argument"},
		"parameter twice":        {"GET", "/v1/sandboxes?limit=1&limit=2", "", 400, "invalid_argument"},
		"limit of none":          {"GET", "/v1/sandboxes?limit=0", "", 400, "invalid_argument"},
		"no such state":          {"GET", "/v1/sandboxes?state=bogus", "", 400, "invalid_argument"},
		"limit beyond":           {"GET", "/v1/sandboxes?limit=1001", "", 400, "invalid_argument"},
		"exec without id":        {"POST", "/v1/sandboxes/s/exec", `{"argv":["x"]}`, 400, "invalid_argument"},
		"exec id that is a path": {"POST", "/v1/sandboxes/s/exec", `{"exec_id":"../x"}`, 400, "invalid_argument"},
		"no path":                {"GET", "/v1/sandboxes/s/files", "", 400, "invalid_argument"},
		"NUL in a path":          {"GET", "/v1/sandboxes/s/files?path=a%00", "", 400, "file_path"},
		"long path":              {"GET", "/v1/sandboxes/s/files?path=" + strings.Repeat("a", 4097), "", 400, "file_path"},
		"signal 0":               {"POST", "/v1/sandboxes/s/exec/e/signal", `{"signal":0}`, 400, "invalid_argument"},
		"mode that is none":      {"PUT", "/v1/sandboxes/s/files?path=a&mode=9", "", 400, "invalid_argument"},
		"ttl of nothing":         {"POST", "/v1/sandboxes/s/ttl", ``, 400, "invalid_argument"},
		"events after nothing":   {"GET", "/v1/events?after=x", "", 400, "invalid_argument"},
	} {
		t.Run(name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), tt.method, url+tt.path, strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer run")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			raw, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != tt.status || !strings.Contains(string(raw), `"code":"`+tt.code+`"`) {
				t.Errorf("got %d %s (%v), want %d %s", resp.StatusCode, raw, err, tt.status, tt.code)
			}
		})
	}
}

func TestRangesAreServedOrRefusedByType(t *testing.T) {
	n := newFake()
	n.files["/ten"], n.files["/none"] = []byte("0123456789"), nil
	url := serve(t, n)
	for text, want := range map[string]struct {
		path   string
		status int
		body   string
		part   string
	}{
		"bytes=2-4": {"/ten", 206, "234", "bytes 2-4/10"}, "bytes=8-": {"/ten", 206, "89", "bytes 8-9/10"}, "bytes=8-99": {"/ten", 206, "89", "bytes 8-9/10"}, "bytes=-3": {"/ten", 206, "789", "bytes 7-9/10"},
		"bytes=-99": {"/ten", 206, "0123456789", "bytes 0-9/10"}, "bytes=10-": {"/ten", 416, "", "bytes */10"}, "bytes=-5": {"/none", 416, "", "bytes */0"},
		"bytes=-0": {"/ten", 416, "", ""}, "bytes=0-1,3-4": {"/ten", 416, "", ""}, "bytes=0-1,-1": {"/ten", 416, "", ""}, "bytes=4-2": {"/ten", 400, "", ""}, "bytes=-": {"/ten", 400, "", ""}, "lines=1-2": {"/ten", 400, "", ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/sandboxes/s/files?path="+want.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer run")
		req.Header.Set("Range", text)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != want.status || want.status == 206 && string(b) != want.body || resp.Header.Get("Content-Range") != want.part {
			t.Errorf("%s of %s: %d %q %q, %v", text, want.path, resp.StatusCode, resp.Header.Get("Content-Range"), b, err)
		}
		if want.status == 416 && !strings.Contains(string(b), "range_not_satisfiable") {
			t.Errorf("%s: %s", text, b)
		}
	}
}

// forgetful loses an output between the end of its exec and the answer.
type forgetful struct{ *fakeNode }

func (n forgetful) Output(context.Context, string, string, string, int64, io.Writer) (int64, error) {
	n.change(func() {
		o := &n.exec.Stdout
		o.Dropped, o.Kept, o.DroppedBy = o.Dropped+o.Kept, 0, sandbox.DroppedOld
	})
	return 0, nil
}

func TestAnAnswerHasWhatItsStateSays(t *testing.T) {
	n := forgetful{newFake()}
	n.print("hello", true)
	a, err := connect(t, n, "run").Exec(t.Context(), "s1", sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "e", Argv: []string{"x"}}})
	if err != nil || len(a.Out) != 0 || a.More || a.Stdout.Kept != 0 || a.Stdout.Dropped != 5 || a.Stdout.DroppedBy != sandbox.DroppedOld || *a.ExitCode != 3 {
		t.Errorf("%+v, %v", a, err)
	}
}
