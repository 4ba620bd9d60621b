package nbd

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sync/semaphore"
)

// errDisconnect says that the client sent DISC.
var errDisconnect = errors.New("client disconnected")

// serverConn is the transmission phase of one connection.
type serverConn struct {
	sess   *session
	r      *bufio.Reader // of the goroutine in receive
	budget *semaphore.Weighted
	bufs   *bufferPool
	cancel context.CancelFunc // ends every read of the connection
	work   sync.WaitGroup     // goroutines in receive or answerLater
	ended  chan error         // of length 1: why no more requests are received

	wmu sync.Mutex // held while one whole reply is written
	w   *socket
}

// serve answers requests until the client disconnects, which lets the reads
// under way finish, or the connection is lost, which ends them.
func (c *serverConn) serve(ctx context.Context) error {
	defer c.work.Wait()
	c.work.Go(func() { c.receive(ctx) })
	err := <-c.ended
	if errors.Is(err, errDisconnect) {
		return nil
	}
	c.cancel()
	return err
}

// receive reads requests and answers them until there are no more, or until
// another goroutine has taken its place. One that has to wait for an answer, with
// no request behind it, sends another to receive: to start that takes the time of a
// wake-up, which then nobody waits for.
func (c *serverConn) receive(ctx context.Context) {
	for {
		q, charge, err := c.nextToWait(ctx)
		if err != nil {
			c.ended <- err
			return
		}
		if c.r.Buffered() < requestSize {
			c.work.Go(func() { c.receive(ctx) })
			c.answerLater(ctx, q, charge)
			return
		}
		c.work.Go(func() { c.answerLater(ctx, q, charge) })
	}
}

// nextToWait reads requests and answers those that can be answered at once. It
// returns the first other one, with its charge, which is taken.
func (c *serverConn) nextToWait(ctx context.Context) (q request, charge int64, err error) {
	for {
		q, err := c.next()
		if err != nil {
			return q, 0, err
		}
		if errno := q.validate(c.sess.dev.Size(), c.sess.structured); errno != 0 {
			if err := c.replyError(q, errno, "this export is read-only and serves READ and CACHE within its size"); err != nil {
				return q, 0, err
			}
			continue
		}
		if done, err := c.answerNow(q); err != nil {
			return q, 0, err
		} else if done {
			continue
		}
		charge := chargeOf(q)
		return q, charge, c.budget.Acquire(ctx, charge)
	}
}

// answerLater answers a request and gives its charge back.
func (c *serverConn) answerLater(ctx context.Context, q request, charge int64) {
	defer c.budget.Release(charge)
	if err := c.answer(ctx, q); err != nil {
		// The reply could not be written whole; nothing after it can be
		// understood, so the connection ends.
		c.cancel()
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
	head := c.dataHead()
	buf := c.bufs.get(head + int(q.length))
	defer c.bufs.put(buf)
	if err := c.sess.dev.ReadAt(ctx, (*buf)[head:], int64(q.off)); err != nil {
		return c.replyReadError(ctx, q, err)
	}
	return c.replyData(q, *buf)
}

// maxAtOnce is the longest read that is answered before the next request is
// received, if it can be at once: all that the shim asks for. Reads of 256 KiB made
// one after the other are a third faster than with a goroutine each, and many made at
// once are no slower (BenchmarkView).
const maxAtOnce = 256 << 10

// answerNow answers a READ that the device can fill without waiting: to start a
// goroutine for that costs more than the read, above all when it wakes a
// processor.
func (c *serverConn) answerNow(q request) (done bool, err error) {
	dev, ok := c.sess.dev.(ReadyDevice)
	if !ok || q.typ != cmdRead || q.length == 0 || q.length > maxAtOnce {
		return false, nil
	}
	head := c.dataHead()
	buf := c.bufs.get(head + int(q.length))
	defer c.bufs.put(buf)
	if !dev.TryReadAt((*buf)[head:], int64(q.off)) {
		return false, nil
	}
	return true, c.replyData(q, *buf)
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

// dataHead is how many bytes stand before the payload of a good reply.
func (c *serverConn) dataHead() int {
	if c.sess.structured {
		return structuredSize + 8
	}
	return simpleSize
}

// replyData sends b, a payload with room for its head before it, in one write.
func (c *serverConn) replyData(q request, b []byte) error {
	if !c.sess.structured {
		appendSimple(b[:0], q, 0)
		return c.write(b)
	}
	h := appendStructured(b[:0], q, replyOffsetData, len(b)-structuredSize)
	binary.BigEndian.AppendUint64(h, q.off)
	return c.write(b)
}

func (c *serverConn) replyDone(q request) error {
	if !c.sess.structured {
		return c.write(simpleHeader(q, 0))
	}
	return c.write(appendStructured(nil, q, replyNone, 0))
}

func (c *serverConn) replyError(q request, errno uint32, msg string) error {
	if !c.sess.structured {
		return c.write(simpleHeader(q, errno))
	}
	msg = truncate(msg)
	b := appendStructured(nil, q, replyError, 6+len(msg))
	b = binary.BigEndian.AppendUint32(b, errno)
	b = binary.BigEndian.AppendUint16(b, uint16(len(msg)))
	return c.write(append(b, msg...))
}

func simpleHeader(q request, errno uint32) []byte {
	return appendSimple(make([]byte, 0, simpleSize), q, errno)
}

func appendSimple(b []byte, q request, errno uint32) []byte {
	b = binary.BigEndian.AppendUint32(b, magicSimple)
	b = binary.BigEndian.AppendUint32(b, errno)
	return binary.BigEndian.AppendUint64(b, q.cookie)
}

// appendStructured appends the header of the only piece of a reply.
func appendStructured(b []byte, q request, typ uint16, length int) []byte {
	b = binary.BigEndian.AppendUint32(b, magicStructured)
	b = binary.BigEndian.AppendUint16(b, replyFlagDone)
	b = binary.BigEndian.AppendUint16(b, typ)
	b = binary.BigEndian.AppendUint64(b, q.cookie)
	return binary.BigEndian.AppendUint32(b, uint32(length))
}

func (c *serverConn) write(b []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	_, err := c.w.Write(b)
	return err
}
