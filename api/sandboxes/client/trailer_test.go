package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// breaking fails in the middle of whatever it sends, with n.err; without one it sends
// all of it.
type breaking struct {
	*fakeNode
	sent []byte // before it fails
}

func (n breaking) TarDown(_ context.Context, _ string, _ sandbox.TarOptions, w io.Writer) error {
	_, err := w.Write(n.sent)
	return errors.Join(err, n.err)
}

func (n breaking) ReadFile(_ context.Context, _, path string, _ sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	size := int64(len(n.sent))
	if n.err != nil {
		size = sandboxes.MaxHashed + size
	}
	if err := begin(sandbox.FileInfo{Path: path, Size: size}); err != nil {
		return err
	}
	_, err := w.Write(n.sent)
	return errors.Join(err, n.err)
}

func (n breaking) WaitExec(context.Context, string, string, int64, int64) (sandbox.ExecState, error) {
	return sandbox.ExecState{ID: "e", Stdout: sandbox.Output{Kept: int64(len(n.sent)) + 1}}, nil
}

func (n breaking) Output(_ context.Context, _, _, _ string, _ int64, w io.Writer) (int64, error) {
	m, err := w.Write(n.sent)
	return int64(m), errors.Join(err, n.err)
}

func (n breaking) Events(_ context.Context, _ uint64, _ string, fn func(sandbox.Event) error) error {
	return errors.Join(fn(sandbox.Event{Sequence: 1, Type: "running"}), n.err)
}

func newBreaking(err error) breaking {
	n := breaking{newFake(), []byte("some")}
	n.err = err
	return n
}

// streams are the answers that can fail after their first byte.
var streams = map[string]func(*client.Client, context.Context) error{
	"tar": func(c *client.Client, ctx context.Context) error {
		return c.TarDown(ctx, "s1", sandbox.TarOptions{Path: "/"}, io.Discard)
	},
	"file": func(c *client.Client, ctx context.Context) error {
		_, err := c.ReadFile(ctx, "s1", "/f", sandbox.ReadOptions{Length: -1}, io.Discard)
		return err
	},
	"part of a file": func(c *client.Client, ctx context.Context) error {
		_, err := c.ReadFile(ctx, "s1", "/f", sandbox.ReadOptions{Length: sandboxes.MaxHashed + 1}, io.Discard)
		return err
	},
	"output": func(c *client.Client, ctx context.Context) error {
		_, err := c.Output(ctx, "s1", "e", "stdout", 0, io.Discard)
		return err
	},
	"frames": func(c *client.Client, ctx context.Context) error {
		var out, errOff int64
		_, err := c.Follow(ctx, "s1", "e", &out, &errOff, io.Discard, io.Discard)
		return err
	},
	"events": func(c *client.Client, ctx context.Context) error {
		return c.Events(ctx, 0, "", func(sandbox.Event) error { return nil })
	},
}

// withHTTP2 is a client of n by HTTP/2.
func withHTTP2(t *testing.T, n sandbox.Node) *client.Client {
	t.Helper()
	srv := serveHTTP2(t, n)
	c, err := client.New(client.Config{URL: srv.URL, HTTP: srv.Client()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What fails after its first byte says why, as what fails before does.
func TestAnAnswerThatFailsInTheMiddleSaysWhy(t *testing.T) {
	over := &sandbox.EndedError{ID: "s1", End: sandbox.End{Reason: sandbox.ReasonOOM, Blame: sandbox.BlameAgent, Message: strings.Repeat("m", 4000)}}
	over.End.Evidence.ImageErrors = []string{strings.Repeat("e", 4000)}
	for name, tt := range map[string]struct{ err, is error }{
		"changed":  {fmt.Errorf("%w: \"/a\xff\x7f\n\u00fc\U0001f600\": it changed while it was read", sandbox.ErrFileStuck), sandbox.ErrFileStuck},
		"long":     {fmt.Errorf("%w: %s: the reason", sandbox.ErrTooLarge, strings.Repeat("\u00fc", 1<<20)), sandbox.ErrTooLarge},
		"ended":    {over, sandbox.ErrEnded},
		"internal": {errors.New("nobody knows"), nil},
	} {
		n := newBreaking(tt.err)
		clients := map[string]*client.Client{"HTTP/1.1": connect(t, n, "run"), "HTTP/2": withHTTP2(t, n)}
		for stream, call := range streams {
			for proto, c := range clients {
				err := call(c, t.Context())
				e, ok := errors.AsType[*sandboxes.Error](err)
				if !ok || tt.is != nil && !errors.Is(err, tt.is) || e.SandboxID == "" && stream != "events" || e.RequestID == "" {
					t.Errorf("%s, %s, %s: %#v %v", name, stream, proto, e, err)
				}
				if name == "long" && !strings.HasSuffix(err.Error(), "the reason") || name == "changed" && !strings.Contains(err.Error(), "\u00fc\U0001f600") {
					t.Errorf("%s, %s, %s: %s", name, stream, proto, err)
				}
				if ended, ok := errors.AsType[*sandbox.EndedError](err); ok != (name == "ended") || ok && ended.End.Reason != sandbox.ReasonOOM {
					t.Errorf("%s, %s, %s: %#v", name, stream, proto, ended)
				}
			}
		}
	}
}

// Less than the worker has said is no whole answer, though nothing failed.
func TestAnOutputThatIsForgottenMeanwhileSaysSo(t *testing.T) {
	n := newBreaking(nil)
	for proto, c := range map[string]*client.Client{"HTTP/1.1": connect(t, n, "run"), "HTTP/2": withHTTP2(t, n)} {
		if next, err := c.Output(t.Context(), "s1", "e", "stdout", 0, io.Discard); !errors.Is(err, sandbox.ErrNotReady) || next != 4 {
			t.Errorf("%s: %d, %v", proto, next, err)
		}
	}
}

// A client that does not read trailers must not take what it has for all there is: its
// connection is cut. One that does finds the reason, and no digest that fits what came.
func TestWhoReadsNoTrailersIsCutOff(t *testing.T) {
	url := serve(t, newBreaking(sandbox.ErrFileStuck))
	for _, path := range []string{"tar?path=/", "files?path=/", "exec/e/output"} {
		for te, told := range map[string]bool{"": false, "gzip": false, "trailers": true, "gzip, trailers;q=0.5": true} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/sandboxes/s1/"+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer run")
			if te != "" {
				req.Header.Set("TE", te)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				if told {
					t.Errorf("%s, TE %q: %v", path, te, err)
				}
				continue // it was cut off before its head was sent
			}
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if told && (err != nil || !strings.Contains(resp.Trailer.Get(sandboxes.HeaderError), `"code":"file_stuck"`) || resp.Trailer.Get(sandboxes.HeaderSHA256) != "") {
				t.Errorf("%s, TE %q: %v, %v", path, te, resp.Trailer, err)
			}
			if !told && err == nil {
				t.Errorf("%s, TE %q: it has an end, and is not whole", path, te)
			}
		}
	}
}

// A connection that is cut, and an answer that has an end and nothing behind it, as
// through a proxy that drops trailers, are errors too.
func TestWithoutAReasonItIsCutOff(t *testing.T) {
	for name, end := range map[string]func(){"cut": func() { panic(http.ErrAbortHandler) }, "without trailers": func() {}} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(sandboxes.HeaderInfo, "{}")
			w.Header().Set(sandboxes.HeaderNext, "5")
			fmt.Fprint(w, "some")
			_ = http.NewResponseController(w).Flush()
			end()
		}))
		t.Cleanup(srv.Close)
		c, err := client.New(client.Config{URL: srv.URL})
		if err != nil {
			t.Fatal(err)
		}
		for stream, call := range streams {
			if err := call(c, t.Context()); !errors.Is(err, client.ErrCutOff) && !errors.Is(err, sandbox.ErrDigest) {
				t.Errorf("%s, %s: %v", name, stream, err)
			}
		}
	}
}

// A stream of events that ends with its worker says so.
func TestEventsSayThatTheWorkerEnds(t *testing.T) {
	h := sandboxes.NewHandler(sandboxes.Config{Node: newFake()})
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	c, err := client.New(client.Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	err = c.Events(t.Context(), 0, "", func(e sandbox.Event) error {
		if e.Sequence == 3 {
			h.Stop()
		}
		return nil
	})
	if !errors.Is(err, sandbox.ErrNotReady) {
		t.Error(err)
	}
}
