package nbd

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
)

const (
	// DefaultInFlight is 512 reads of 128 KiB: four times what a loop device or
	// a kernel NBD queue (128 deep) can have open, so one connection's stalled
	// reads never fill it.
	DefaultInFlight = 64 << 20
	// DefaultConns is several connections for each of the 64 images a worker
	// is made for.
	DefaultConns = 512
	// minCharge is what a short read counts, so that the bound on bytes bounds
	// requests (to 4096) as well.
	minCharge = 16 << 10
	// cachePiece is how much of a CACHE request is read at a time.
	cachePiece = 256 << 10
	// handshakeTimeout is for the whole handshake, opening the export included.
	handshakeTimeout = 30 * time.Second
)

// Server serves exports. The fields are set before Serve and not changed after.
type Server struct {
	// Exports opens an export. Its error goes to the client; one that wraps
	// ErrUnknownExport says there is none of that name. Called once or more for
	// each connection, concurrently. A device that is an io.Closer is closed when
	// the connection it was opened for has ended, as often as it was returned.
	Exports func(ctx context.Context, name string) (Device, error)
	// Names answers LIST; nil means an empty list.
	Names func() []string
	// InFlight bounds the bytes of the reads under way on one connection; 0
	// means DefaultInFlight, and it is at least MaxPayload. A connection at its
	// bound is not read from.
	InFlight int64
	// Conns bounds the connections; more are closed at once. 0 means DefaultConns.
	Conns int
	// Log says why connections ended. nil discards.
	Log *slog.Logger

	buffers bufferPool
}

// Serve accepts connections until ctx ends, then closes l and every connection,
// waits for their reads, and returns nil. It returns an error only when l fails.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel() // before Wait, which otherwise waits for idle clients
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	maxConns := s.Conns
	if maxConns == 0 {
		maxConns = DefaultConns
	}
	slots := semaphore.NewWeighted(int64(maxConns))
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) {
				// Out of descriptors: wait for some to be freed.
				s.log().WarnContext(ctx, "nbd accept", "err", err)
				time.Sleep(50 * time.Millisecond)
				continue
			}
			return fmt.Errorf("accept nbd connection: %w", err)
		}
		if !slots.TryAcquire(1) {
			s.log().WarnContext(ctx, "nbd connection refused", "limit", maxConns)
			c.Close()
			continue
		}
		conns.Go(func() {
			defer slots.Release(1)
			s.serveConn(ctx, c)
		})
	}
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

// opened are the devices that one connection has asked for.
type opened struct {
	srv     *Server
	devices []Device
}

func (o *opened) open(ctx context.Context, name string) (Device, error) {
	if len(name) > MaxName {
		return nil, fmt.Errorf("%w: its name has %d bytes", ErrUnknownExport, len(name))
	}
	dev, err := o.srv.Exports(ctx, name)
	if err == nil {
		o.devices = append(o.devices, dev)
	}
	return dev, err
}

// close closes the devices that want to know when they are no longer used.
func (o *opened) close() {
	for _, dev := range o.devices {
		if c, ok := dev.(io.Closer); ok {
			c.Close()
		}
	}
}

// serveConn owns c: it is closed when serveConn returns, and every read of it
// has ended.
func (s *Server) serveConn(ctx context.Context, c net.Conn) {
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Closing unblocks whatever waits on the connection when the server stops.
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	br := bufio.NewReader(c)
	devices := &opened{srv: s}
	defer devices.close()
	sess, err := s.handshake(ctx, c, br, devices)
	if err != nil {
		if !errors.Is(err, errHandshakeOver) && !errors.Is(err, io.EOF) {
			s.log().InfoContext(ctx, "nbd handshake ended", "err", err)
		}
		return
	}
	inFlight := max(s.InFlight, MaxPayload)
	if s.InFlight == 0 {
		inFlight = DefaultInFlight
	}
	sc := &serverConn{sess: sess, r: br, w: c, budget: semaphore.NewWeighted(inFlight), bufs: &s.buffers, cancel: cancel}
	if err := sc.serve(ctx); err != nil && !errors.Is(err, io.EOF) {
		s.log().InfoContext(ctx, "nbd connection ended", "export", sess.name, "err", err)
	}
}

func (s *Server) handshake(ctx context.Context, c net.Conn, r io.Reader, devices *opened) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	sess, err := haggle(ctx, devices, r, c)
	if err != nil {
		return nil, err
	}
	return sess, c.SetDeadline(time.Time{})
}

// errDisconnect says that the client sent DISC.
var errDisconnect = errors.New("client disconnected")

// serverConn is the transmission phase of one connection.
type serverConn struct {
	sess   *session
	r      io.Reader
	budget *semaphore.Weighted
	bufs   *bufferPool
	cancel context.CancelFunc // ends every read of the connection

	wmu sync.Mutex // held while one whole reply is written
	w   net.Conn
}

// serve answers requests until the client disconnects, which lets the reads
// under way finish, or the connection is lost, which ends them.
func (c *serverConn) serve(ctx context.Context) error {
	var reads sync.WaitGroup
	defer reads.Wait()
	err := c.receive(ctx, &reads)
	if errors.Is(err, errDisconnect) {
		return nil
	}
	c.cancel()
	return err
}

// receive reads requests and answers each from its own goroutine.
func (c *serverConn) receive(ctx context.Context, reads *sync.WaitGroup) error {
	for {
		q, err := c.next()
		if err != nil {
			return err
		}
		if errno := q.validate(c.sess.dev.Size(), c.sess.structured); errno != 0 {
			if err := c.replyError(q, errno, "this export is read-only and serves READ and CACHE within its size"); err != nil {
				return err
			}
			continue
		}
		charge := chargeOf(q)
		if err := c.budget.Acquire(ctx, charge); err != nil {
			return err
		}
		reads.Go(func() {
			defer c.budget.Release(charge)
			if err := c.answer(ctx, q); err != nil {
				// The reply could not be written whole; nothing after it can be
				// understood, so the connection ends.
				c.cancel()
			}
		})
	}
}

// next reads one request. The data of a WRITE, which will be refused, is
// skipped, because the next request stands after it.
func (c *serverConn) next() (request, error) {
	var b [requestSize]byte
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return request{}, err
	}
	q, err := decodeRequest(&b)
	switch {
	case err != nil:
		return request{}, err
	case q.typ == cmdDisc:
		return request{}, errDisconnect
	case q.typ == cmdWrite && q.length > MaxPayload:
		return request{}, fmt.Errorf("write of %d bytes, at most %d are skipped", q.length, MaxPayload)
	case q.typ == cmdWrite:
		_, err = io.CopyN(io.Discard, c.r, int64(q.length))
	}
	return q, err
}

// chargeOf is what q counts against the bound: the memory its answer needs.
func chargeOf(q request) int64 {
	n := int64(q.length)
	if q.typ == cmdCache {
		n = min(n, cachePiece)
	}
	return max(n, minCharge)
}

// answer serves one valid READ or CACHE. A reply header is written only when
// the whole payload is there.
func (c *serverConn) answer(ctx context.Context, q request) error {
	if q.typ == cmdCache {
		if err := c.prefetch(ctx, q); err != nil {
			return c.replyReadError(ctx, q, err)
		}
		return c.replyDone(q)
	}
	if q.length == 0 {
		return c.replyDone(q)
	}
	buf := c.bufs.get(int(q.length))
	defer c.bufs.put(buf)
	if err := c.sess.dev.ReadAt(ctx, *buf, int64(q.off)); err != nil {
		return c.replyReadError(ctx, q, err)
	}
	return c.replyData(q, *buf)
}

// replyReadError says that q could not be read, unless that is only because the
// server stops: a client can ask the next server what was never answered.
func (c *serverConn) replyReadError(ctx context.Context, q request, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return c.replyError(q, errnoIO, err.Error())
}

// prefetch reads a range and drops it, which leaves it in the device's cache.
func (c *serverConn) prefetch(ctx context.Context, q request) error {
	end := int64(q.off) + int64(q.length)
	buf := c.bufs.get(int(min(int64(q.length), cachePiece)))
	defer c.bufs.put(buf)
	for off := int64(q.off); off < end; {
		p := (*buf)[:min(end-off, int64(len(*buf)))]
		if err := c.sess.dev.ReadAt(ctx, p, off); err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}

func (c *serverConn) replyData(q request, p []byte) error {
	if !c.sess.structured {
		return c.write(simpleHeader(q, 0), p)
	}
	b := structuredHeader(q, replyOffsetData, 8+len(p))
	return c.write(binary.BigEndian.AppendUint64(b, q.off), p)
}

func (c *serverConn) replyDone(q request) error {
	if !c.sess.structured {
		return c.write(simpleHeader(q, 0), nil)
	}
	return c.write(structuredHeader(q, replyNone, 0), nil)
}

func (c *serverConn) replyError(q request, errno uint32, msg string) error {
	if !c.sess.structured {
		return c.write(simpleHeader(q, errno), nil)
	}
	msg = truncate(msg)
	b := structuredHeader(q, replyError, 6+len(msg))
	b = binary.BigEndian.AppendUint32(b, errno)
	b = binary.BigEndian.AppendUint16(b, uint16(len(msg)))
	return c.write(append(b, msg...), nil)
}

func simpleHeader(q request, errno uint32) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, simpleSize), magicSimple)
	b = binary.BigEndian.AppendUint32(b, errno)
	return binary.BigEndian.AppendUint64(b, q.cookie)
}

// structuredHeader begins the only piece of a reply.
func structuredHeader(q request, typ uint16, length int) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, structuredSize+8), magicStructured)
	b = binary.BigEndian.AppendUint16(b, replyFlagDone)
	b = binary.BigEndian.AppendUint16(b, typ)
	b = binary.BigEndian.AppendUint64(b, q.cookie)
	return binary.BigEndian.AppendUint32(b, uint32(length))
}

func (c *serverConn) write(head, payload []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	bufs := net.Buffers{head}
	if len(payload) > 0 {
		bufs = append(bufs, payload)
	}
	_, err := bufs.WriteTo(c.w)
	return err
}
