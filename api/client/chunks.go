package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"

	"quarry/api"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
)

var (
	_ store.Getter      = (*Client)(nil)
	_ store.BatchGetter = (*Client)(nil)
)

// Get implements store.Getter, as a batch of one: the chunk crosses the network
// as it is stored.
func (c *Client) Get(ctx context.Context, d chunk.Digest, dst []byte) ([]byte, error) {
	return getOne(ctx, c, d, dst)
}

// GetBatch implements store.BatchGetter. Chunks that an attempt did not answer,
// or answered with bytes that are not theirs, are asked for again; fn hears of a
// failure only when no attempt is left. An answer cut off behind its last chunk
// has answered, as every chunk was verified; one that breaks the format is an
// error even then.
func (c *Client) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	return inGroups(ds, func(group []chunk.Digest) error { return c.getGroup(ctx, group, fn) })
}

// group is a set of digests on their way to an answer.
type group struct {
	fn     func(chunk.Digest, []byte, error) error
	open   []chunk.Digest         // not answered yet, in the order asked
	failed map[chunk.Digest]error // of open: how the last attempt failed
}

func (c *Client) getGroup(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	g := &group{fn: fn, open: ds}
	exact := false
	for n := 1; len(g.open) > 0; n++ {
		err := g.ask(ctx, c, exact)
		exact = exact || errors.As(err, new(brokenOff))
		var s *stop
		switch {
		case errors.As(err, &s):
			return s.err
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !retryable(err):
			return err
		case n >= c.cfg.Attempts:
			return g.giveUp(err)
		case len(g.open) == 0 && errors.As(err, new(*api.FrameError)):
			return err // nothing left to ask for, but a server that lies
		}
		if len(g.open) > 0 {
			if werr := c.pause(ctx, n, err); werr != nil {
				return werr
			}
		}
	}
	return nil
}

// ask makes one attempt, see Client.ask. What it leaves in g.open has not been answered.
func (g *group) ask(ctx context.Context, c *Client, exact bool) error {
	g.failed = make(map[chunk.Digest]error)
	answered := make(map[chunk.Digest]bool, len(g.open))
	err := c.ask(ctx, g.open, exact, func() {}, func(d chunk.Digest, p []byte, err error) error {
		if err != nil && !final(err) {
			g.failed[d] = err
			return nil
		}
		answered[d] = true
		return g.fn(d, p, err)
	})
	var open []chunk.Digest
	for _, d := range g.open {
		if !answered[d] {
			open = append(open, d)
		}
	}
	g.open = open
	return err
}

// giveUp reports what stays open: chunks with an error of their own to fn, and
// the error of the answer when it has not even those.
func (g *group) giveUp(err error) error {
	for _, d := range g.open {
		reason := g.failed[d]
		if reason == nil {
			continue
		}
		if ferr := g.fn(d, nil, reason); ferr != nil {
			return ferr
		}
	}
	return err
}

// said marks a server's own word about a chunk: asking it again is of no use.
type said struct{ error }

func (s said) Unwrap() error { return s.error }

func final(err error) bool { return errors.As(err, new(said)) }

// ask asks for at most api.MaxBatch different digests. answer
// hears of each chunk at most once, with its verified bytes, valid during the
// call, or its own error; an error of answer ends the attempt and is returned as
// a *stop. moved is called when minProgress bytes have come.
//
// Of an answer in version 2 the server has read nothing. What is wrong in it is asked
// for again in version 1, where the server compares checksums and says what it finds, so
// that it knows of its damage. With exact all is asked for so.
func (c *Client) ask(ctx context.Context, ds []chunk.Digest, exact bool, moved func(), answer func(chunk.Digest, []byte, error) error) error {
	if exact {
		_, err := c.askFor(ctx, ds, api.TypeFrames, moved, answer)
		return err
	}
	doubted, err := c.askFor(ctx, ds, api.TypeFrames2+", "+api.TypeFrames, moved, answer)
	if len(doubted) == 0 || errors.As(err, new(*stop)) || ctx.Err() != nil {
		return err
	}
	_, again := c.askFor(ctx, doubted, api.TypeFrames, moved, answer)
	if err == nil || errors.As(again, new(*stop)) {
		return again
	}
	return err // of the chunks that did not come
}

// askFor sends one batchGet for an answer of those types. doubted are chunks that were
// wrong in version 2, or that it broke off before; answer has not heard of them.
func (c *Client) askFor(ctx context.Context, ds []chunk.Digest, media string, moved func(), answer func(chunk.Digest, []byte, error) error) (doubted []chunk.Digest, err error) {
	rq := request{
		method: http.MethodPost, path: "/v1/chunks:batchGet",
		body: api.EncodeDigests(ds), contentType: api.TypeDigests, media: media,
	}
	begun := false
	err = c.attempt(ctx, rq, func(resp *http.Response) error {
		a := &answers{asked: make(map[chunk.Digest]bool, len(ds)), answer: answer}
		kind := resp.Header.Get("Content-Type")
		switch {
		case kind == api.TypeFrames:
			a.version = 1
		case kind == api.TypeFrames2 && media != api.TypeFrames:
			a.version = 2
		default:
			return fmt.Errorf("%w: batch answer has Content-Type %q, want %s: is this a quarry server?", errNoBatch, kind, media)
		}
		if coding := resp.Header.Get("Content-Encoding"); coding != "" {
			return fmt.Errorf("%w: batch answer has Content-Encoding %q, which was not asked for", errNoBatch, coding)
		}
		for _, d := range ds {
			a.asked[d] = true
		}
		err := a.read(&movingReader{Reader: resp.Body, moved: moved}, len(ds))
		if doubted = a.doubted; err != nil {
			begun = a.version > 1
			return err
		}
		read := resp.Trailer
		if a.version > 1 {
			read = resp.Header
		}
		c.n.bucket.Add(bucketBytes(read.Get(api.HeaderBucketBytes)))
		return nil
	})
	if begun && !errors.As(err, new(*stop)) {
		err = brokenOff{err}
	}
	return doubted, err
}

// brokenOff is the error of an answer in version 2 that had begun. It may be that the
// server cannot read a chunk, of which it can say no more then: it is asked in version 1
// after that.
type brokenOff struct{ error }

func (b brokenOff) Unwrap() error { return b.error }

// errNoBatch says that an answer is none of batchGet's.
var errNoBatch = errors.New("not a batch answer")

// maxBucketBytes bounds what one answer may say of its bucket: each chunk of a
// batch read twice, by ranges that are gaps to one half.
const maxBucketBytes = api.MaxBatch * chunk.MaxSize * 4

// bucketBytes reads the trailer of a batch answer, 0 when it is none.
func bucketBytes(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n > maxBucketBytes {
		return 0
	}
	return n
}

// movingReader calls moved whenever minProgress more bytes have come.
type movingReader struct {
	io.Reader
	moved func()
	n     int
}

func (r *movingReader) Read(p []byte) (int, error) {
	k, err := r.Reader.Read(p)
	if r.n += k; r.n >= minProgress {
		r.n = 0
		r.moved()
	}
	return k, err
}

// answers takes one batch answer.
type answers struct {
	version int
	asked   map[chunk.Digest]bool // and not answered yet
	doubted []chunk.Digest        // of version 2: to be asked for in version 1
	answer  func(chunk.Digest, []byte, error) error
	plain   []byte // decoding buffer
}

func (a *answers) read(body io.Reader, count int) error {
	fr := api.NewFrameReader(body, count)
	for {
		f, err := fr.Next()
		if v := fr.Version(); (err == nil || err == io.EOF) && v != a.version {
			err = &api.FrameError{Reason: fmt.Sprintf("an answer in version %d is said to be in version %d", v, a.version)}
		}
		if err == nil && !a.asked[f.Digest] {
			err = &api.FrameError{Off: fr.Offset(), Reason: fmt.Sprintf("frame for %s, which was not asked for or was answered before", f.Digest)}
		}
		switch {
		case err == io.EOF:
			return a.complete(count)
		case err != nil && a.version > 1 && len(a.asked) > 0 && errors.As(err, new(*api.FrameError)):
			// The record of one chunk is damaged, and with it where the others are.
			a.doubted = slices.AppendSeq(a.doubted, maps.Keys(a.asked))
			return nil
		case err != nil:
			return errors.Join(err, a.blame(err))
		}
		if err := a.take(f); err != nil {
			return err
		}
	}
}

// blame tells the chunk whose frame breaks the format.
func (a *answers) blame(err error) error {
	var fe *api.FrameError
	if !errors.As(err, &fe) || !a.asked[fe.Chunk] {
		return nil
	}
	return a.give(fe.Chunk, nil, &store.CorruptError{Want: fe.Chunk, Err: err})
}

// complete refuses an answer that ends properly and leaves digests out.
func (a *answers) complete(count int) error {
	for d := range a.asked {
		return fmt.Errorf("%w: no frame for %s, asked for with %d others", errNoBatch, d, count-1)
	}
	return nil
}

func (a *answers) give(d chunk.Digest, p []byte, err error) error {
	delete(a.asked, d)
	if aerr := a.answer(d, p, err); aerr != nil {
		return &stop{aerr}
	}
	return nil
}

// take hands on the chunk of a frame, or its error.
func (a *answers) take(f api.Frame) error {
	switch f.Status {
	case api.StatusNotFound:
		return a.give(f.Digest, nil, said{fmt.Errorf("chunk %s: %w", f.Digest, store.ErrNotFound)})
	case api.StatusCorrupt:
		return a.give(f.Digest, nil, said{&store.CorruptError{Want: f.Digest, Err: fmt.Errorf("server says: %s", f.Reason)}})
	case api.StatusError:
		return a.give(f.Digest, nil, &api.Error{
			Code: "chunk_error", Message: fmt.Sprintf("chunk %s: server says: %s", f.Digest, f.Reason),
			Retryable: true, Blame: api.BlameInfra,
		})
	}
	p, err := a.verify(f)
	if err != nil && a.version > 1 {
		delete(a.asked, f.Digest)
		a.doubted = append(a.doubted, f.Digest)
		return nil
	}
	return a.give(f.Digest, p, err)
}

// verify returns the plain bytes of a frame when they are the chunk's.
func (a *answers) verify(f api.Frame) ([]byte, error) {
	if a.version == 1 { // in version 2 it would only say sooner what the digest says
		if got := pack.Checksum(f.Stored); got != f.CRC {
			return nil, &store.CorruptError{Want: f.Digest, Err: fmt.Errorf("received bytes have CRC32C %08x, the frame says %08x", got, f.CRC)}
		}
	}
	p, err := pack.Decode(a.plain, f.Codec, f.Stored, f.Len)
	if err != nil {
		return nil, &store.CorruptError{Want: f.Digest, Err: err}
	}
	a.plain = p
	if got := chunk.Sum(p); got != f.Digest {
		return nil, &store.CorruptError{Want: f.Digest, Got: got}
	}
	return p, nil
}
