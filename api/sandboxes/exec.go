package sandboxes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"

	"quarry/worker/sandbox"
)

// Media types of an exec's stream.
const (
	TypeNDJSON = "application/x-ndjson"
	TypeEvents = "text/event-stream"
)

// exec starts a command. The answer is one document when the command has ended, or as
// soon as it runs with detach, or a stream of frames for who accepts one.
func (h *Handler) exec(c call) error {
	body, err := decode[ExecRequest](c)
	if err != nil {
		return err
	}
	if !validID(body.ID) {
		return fmt.Errorf("%w: exec_id %q: want 1 to %d letters, digits, '-', '_' and '.'", sandbox.ErrInvalid, body.ID, maxID)
	}
	st, err := h.cfg.Node.Exec(c.r.Context(), c.id, body.ExecSpec)
	if err != nil {
		return err
	}
	c.exec = body.ID
	if body.Detach {
		return c.w.json(http.StatusAccepted, st)
	}
	if body.KillOnDisconnect {
		defer h.killUnlessDone(c, &st)
	}
	if kind := streamType(c.r); kind != "" {
		return h.follow(c, kind, 0, 0, &st)
	}
	return h.answer(c, &st)
}

// killUnlessDone ends the command of a client that has gone.
func (h *Handler) killUnlessDone(c call, st *sandbox.ExecState) {
	if st.Done() || st.State == sandbox.ExecExited || st.State == sandbox.ExecUnknown {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.r.Context()), 10*time.Second)
	defer cancel()
	err := h.cfg.Node.Signal(ctx, c.id, c.exec, int(syscall.SIGKILL))
	if err != nil && !errors.Is(err, sandbox.ErrExecEnded) && !errors.Is(err, sandbox.ErrEnded) {
		h.log.ErrorContext(ctx, "the command of a client that has gone is not ended", "sandbox", c.id, "exec", c.exec, "err", err)
	}
}

// streamType returns which stream a client asks for, "" for none.
func streamType(r *http.Request) string {
	for _, part := range strings.Split(r.Header.Get("Accept"), ",") {
		kind, _, _ := strings.Cut(strings.TrimSpace(part), ";")
		if kind == TypeNDJSON || kind == TypeEvents {
			return kind
		}
	}
	return ""
}

// ended reports whether the command is over, whoever holds its output open.
func ended(st sandbox.ExecState) bool {
	return st.State == sandbox.ExecExited || st.State == sandbox.ExecUnknown
}

// answer waits for the end of an exec and sends it with its output.
func (h *Handler) answer(c call, st *sandbox.ExecState) error {
	ctx, done := h.streaming(c)
	defer done()
	for !ended(*st) {
		next, err := h.cfg.Node.WaitExec(ctx, c.id, c.exec, math.MaxInt64, math.MaxInt64)
		if err != nil {
			return err
		}
		*st = next
		if ctx.Err() != nil && !ended(next) {
			return fmt.Errorf("%w: the command goes on: ask for it by its exec_id", sandbox.ErrNotReady)
		}
	}
	a := ExecAnswer{ExecState: *st}
	var err error
	if a.Out, err = h.inline(ctx, c, "stdout", st.Stdout.Kept); err != nil {
		return err
	}
	if a.Err, err = h.inline(ctx, c, "stderr", st.Stderr.Kept); err != nil {
		return err
	}
	if int64(len(a.Out)) < min(st.Stdout.Kept, MaxInline) || int64(len(a.Err)) < min(st.Stderr.Kept, MaxInline) {
		// Output of others took its place just now: the state says so.
		if *st, err = h.now(c); err != nil {
			return err
		}
		a = ExecAnswer{ExecState: *st, Out: []byte{}, Err: []byte{}}
	}
	a.More = st.Stdout.Kept > int64(len(a.Out)) || st.Stderr.Kept > int64(len(a.Err))
	return c.w.json(http.StatusOK, a)
}

// now is the state of an exec as it is.
func (h *Handler) now(c call) (sandbox.ExecState, error) {
	ctx, cancel := context.WithCancel(c.r.Context())
	cancel()
	return h.cfg.Node.WaitExec(ctx, c.id, c.exec, math.MaxInt64, math.MaxInt64)
}

// errFull ends a copy that has all it wants.
var errFull = errors.New("full")

// limited is a buffer that takes so much and no more.
type limited struct {
	bytes.Buffer
	left int64
}

// Write implements io.Writer. Errors: errFull.
func (l *limited) Write(p []byte) (int, error) {
	n := min(int64(len(p)), l.left)
	l.left -= n
	l.Buffer.Write(p[:n])
	if n < int64(len(p)) {
		return int(n), errFull
	}
	return int(n), nil
}

// inline reads the beginning of an output. What comes while it is read is left out, so
// that the answer has what its counts say.
func (h *Handler) inline(ctx context.Context, c call, stream string, kept int64) ([]byte, error) {
	if kept == 0 {
		return []byte{}, nil
	}
	l := &limited{left: min(kept, MaxInline)}
	_, err := h.cfg.Node.Output(ctx, c.id, c.exec, stream, 0, l)
	if err != nil && !errors.Is(err, errFull) {
		return nil, err
	}
	return l.Bytes(), nil
}

func (h *Handler) execs(c call) error {
	list, err := h.cfg.Node.Execs(c.r.Context(), c.id)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, ExecsPage{append([]sandbox.ExecState{}, list...)})
}

// execState answers at once, or with wait_ms when the exec has ended.
func (h *Handler) execState(c call) error {
	wait, err := c.number("wait_ms", 0, MaxWait.Milliseconds())
	if err != nil {
		return err
	}
	ctx, done := h.streaming(c)
	defer done()
	end := time.Now().Add(time.Duration(wait) * time.Millisecond)
	for {
		waiting, cancel := context.WithDeadline(ctx, end)
		st, err := h.cfg.Node.WaitExec(waiting, c.id, c.exec, math.MaxInt64, math.MaxInt64)
		over := waiting.Err() != nil
		cancel()
		if err != nil {
			return err
		}
		if over || ended(st) {
			return c.w.json(http.StatusOK, st)
		}
	}
}

// execStream takes up the stream of an exec from offsets of its outputs on.
func (h *Handler) execStream(c call) error {
	out, err := c.number("stdout", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	errOff, err := c.number("stderr", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	st, err := h.now(c)
	if err != nil {
		return err
	}
	for name, v := range map[string]struct {
		from int64
		of   sandbox.Output
	}{"stdout": {out, st.Stdout}, "stderr": {errOff, st.Stderr}} {
		// What is forgotten by now was there for who takes the stream up behind it.
		if there := v.of.Kept + v.of.Dropped; v.from > there {
			return fmt.Errorf("%w: %s=%d: %d bytes have come: go on from there", sandbox.ErrInvalid, name, v.from, there)
		}
	}
	kind := streamType(c.r)
	if kind == "" {
		kind = TypeNDJSON
	}
	return h.follow(c, kind, out, errOff, &st)
}

// maxFrame bounds the bytes of output in one frame.
const maxFrame = 256 << 10

// follow streams the outputs of an exec until its end.
func (h *Handler) follow(c call, kind string, out, errOff int64, st *sandbox.ExecState) error {
	ctx, done := h.streaming(c)
	defer done()
	c.w.Header().Set("Content-Type", kind)
	c.w.WriteHeader(http.StatusOK)
	if err := c.w.flush(); err != nil {
		return err
	}
	frame := func(f Frame) []byte {
		b, err := json.Marshal(f)
		if err != nil {
			panic(err) // a struct of plain fields
		}
		if kind == TypeEvents {
			return fmt.Appendf(nil, "data: %s\n\n", b)
		}
		return append(b, '\n')
	}
	s := newStream(h, c, func([]byte) []byte { return frame(Frame{T: "pulse"}) })
	defer s.end()
	copyOf := func(name, t string, from int64) (int64, error) {
		w := frameWriter(func(p []byte) error {
			err := s.write(frame(Frame{T: t, Offset: from, Data: p}))
			from += int64(len(p))
			return err
		})
		_, err := h.cfg.Node.Output(ctx, c.id, c.exec, name, from, w)
		return from, err
	}
	for {
		var err error
		over := ended(*st)
		if st.Stdout.Kept > out {
			out, err = copyOf("stdout", "out", out)
		}
		if err == nil && st.Stderr.Kept > errOff {
			errOff, err = copyOf("stderr", "err", errOff)
		}
		if err == nil && over {
			return s.write(frame(Frame{T: "exit", State: st}))
		}
		if err == nil {
			*st, err = h.cfg.Node.WaitExec(ctx, c.id, c.exec, out, errOff)
		}
		if err == nil && ctx.Err() != nil && !ended(*st) {
			err = errClientGone
			if c.r.Context().Err() == nil {
				err = fmt.Errorf("%w: the server ends; the command goes on: take its stream up again", sandbox.ErrNotReady)
			}
		}
		if err != nil {
			e := toError(err)
			e.about(c)
			_ = s.write(frame(Frame{T: "error", Error: e}))
			return err
		}
	}
}

// frameWriter cuts what is written into frames.
type frameWriter func([]byte) error

// Write implements io.Writer.
func (f frameWriter) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		part := p[n:min(len(p), n+maxFrame)]
		if err := f(part); err != nil {
			return n, err
		}
		n += len(part)
	}
	return len(p), nil
}

// output sends what is kept of one stream from an offset on.
func (h *Handler) output(c call) error {
	name := c.q.Get("stream")
	if name == "" {
		name = "stdout"
	}
	if name != "stdout" && name != "stderr" {
		return fmt.Errorf("%w: stream=%q: want stdout or stderr", sandbox.ErrInvalid, name)
	}
	offset, err := c.number("offset", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	st, err := h.now(c)
	if err != nil {
		return err
	}
	o := st.Stdout
	if name == "stderr" {
		o = st.Stderr
	}
	if offset > o.Kept {
		return fmt.Errorf("%w: offset %d: %d bytes are kept: go on from there", sandbox.ErrInvalid, offset, o.Kept)
	}
	head := c.w.Header()
	head.Set("Content-Type", "application/octet-stream")
	if !c.w.trailing(c.r) { // a length leaves no room for trailers
		head.Set("Content-Length", strconv.FormatInt(o.Kept-offset, 10))
	}
	head.Set(HeaderNext, strconv.FormatInt(o.Kept, 10))
	head.Set(HeaderDropped, strconv.FormatInt(o.Dropped, 10))
	head.Set(HeaderClosed, strconv.FormatBool(o.Closed))
	c.w.WriteHeader(http.StatusOK)
	if o.Kept == offset {
		return nil
	}
	w := &cutWriter{c.w, o.Kept - offset}
	_, err = h.cfg.Node.Output(c.r.Context(), c.id, c.exec, name, offset, w)
	if errors.Is(err, errFull) {
		err = nil
	}
	if err == nil && w.left > 0 {
		return fmt.Errorf("%w: %d bytes less came than were kept: output of later commands has just taken their place", sandbox.ErrNotReady, w.left)
	}
	return err
}

// cutWriter passes so many bytes on and refuses the rest.
type cutWriter struct {
	w    *response
	left int64
}

// Write implements io.Writer. Errors: errFull, errClientGone.
func (w *cutWriter) Write(p []byte) (int, error) {
	n, err := w.w.Write(p[:min(int64(len(p)), w.left)])
	w.left -= int64(n)
	if err == nil && n < len(p) {
		err = errFull
	}
	return n, err
}

func (h *Handler) stdin(c call) error {
	offset, err := c.number("offset", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	end, err := c.flag("end")
	if err != nil {
		return err
	}
	next, err := h.cfg.Node.Stdin(c.r.Context(), c.id, c.exec, offset, c.r.Body, end)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, StdinAnswer{next})
}

func (h *Handler) signal(c call) error {
	body, err := decode[SignalRequest](c)
	if err != nil {
		return err
	}
	if body.Signal < 1 || body.Signal > 64 {
		return fmt.Errorf("%w: signal %d: want a number from 1 to 64", sandbox.ErrInvalid, body.Signal)
	}
	if err := h.cfg.Node.Signal(c.r.Context(), c.id, c.exec, body.Signal); err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *Handler) resize(c call) error {
	body, err := decode[sandbox.Window](c)
	if err != nil {
		return err
	}
	if body.Rows < 1 || body.Rows > 65535 || body.Cols < 1 || body.Cols > 65535 {
		return fmt.Errorf("%w: %d rows, %d cols: want 1 to 65535", sandbox.ErrInvalid, body.Rows, body.Cols)
	}
	if err := h.cfg.Node.Resize(c.r.Context(), c.id, c.exec, body); err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}
