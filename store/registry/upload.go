package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/internal/durable"
)

// receiveStep is how much of a body is received at once: what is lost of it when
// the process is killed was never told to the client.
const receiveStep = 256 << 10

// receiveBuffers are reused: a push of many small layers would else make one each.
var receiveBuffers = sync.Pool{New: func() any { return new([receiveStep]byte) }}

// Part is a part of a blob that is sent.
type Part struct {
	Body io.Reader // nil for none
	// At is where the part starts, or -1 where the upload ends; Size is its length,
	// or -1 when it is not known before its end.
	At, Size int64
}

// StartUpload begins an upload to a repository. holder is whose it is, so that one
// cannot take all there is room for; "" is nobody, who has no bound of his own. A
// restart forgets holders. Errors: ErrUploads, ErrHolderUploads.
func (s *Store) StartUpload(repo, holder string) (id string, err error) {
	u, err := s.uploads.start(repo, holder)
	if err != nil {
		return "", err
	}
	return u.id, nil
}

// UploadOffset returns how many bytes of an upload are stored. Errors:
// ErrUploadUnknown.
func (s *Store) UploadOffset(repo, id string) (int64, error) { return s.uploads.offset(repo, id) }

// CancelUpload ends an upload. Errors: ErrUploadUnknown, ErrUploadBusy.
func (s *Store) CancelUpload(repo, id string) error {
	u, err := s.uploads.acquire(repo, id)
	if err != nil {
		return err
	}
	return s.uploads.drop(u)
}

// AppendUpload stores a part at the end of an upload, durably on nil, and returns
// how many bytes are stored then, also with an error: what came of a body that broke
// off stays. Errors: ErrUploadUnknown, ErrUploadBusy, ErrUploadRange,
// ErrSizeInvalid, ErrTooLarge, ErrUploadSpace, ErrHolderSpace, ErrBody.
func (s *Store) AppendUpload(repo, id string, p Part) (int64, error) {
	u, err := s.uploads.acquire(repo, id)
	if err != nil {
		return 0, err
	}
	defer s.uploads.release(u)
	f, err := s.uploads.open(u)
	if err != nil {
		return u.size, err
	}
	defer f.Close()
	err = s.uploads.receive(u, f, p)
	return u.size, errors.Join(err, s.uploads.sync(u, f))
}

// FinishUpload stores a last part, verifies the whole and makes it a blob of the
// repository. Wrong bytes end the upload; after another error it goes on. Errors:
// those of AppendUpload, and ErrDigestInvalid.
func (s *Store) FinishUpload(ctx context.Context, repo, id string, p Part, d digest.Digest) error {
	u, err := s.uploads.acquire(repo, id)
	if err != nil {
		return err
	}
	defer s.uploads.release(u)
	f, err := s.uploads.open(u)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := s.uploads.receive(u, f, p); err != nil {
		return err
	}
	body := io.NewSectionReader(f, headerSize, u.size)
	sum := d.Algorithm().Digester()
	if _, err := io.Copy(sum.Hash(), body); err != nil {
		return fmt.Errorf("read upload %s: %w", id, err)
	}
	if got := sum.Digest(); got != d {
		return errors.Join(fmt.Errorf("%w: the blob is pushed as %s, its bytes have %s", ErrDigestInvalid, d, got), s.uploads.drop(u))
	}
	if err := s.keepBlob(ctx, repo, d, body, u.size); err != nil {
		return err
	}
	if err := s.uploads.drop(u); err != nil {
		s.log.WarnContext(ctx, "finished upload stays", "upload", id, "error", err)
	}
	return nil
}

// Run drops idle uploads until ctx ends.
func (s *Store) Run(ctx context.Context) {
	tick := time.NewTicker(min(s.cfg.EmptyIdle, time.Hour))
	defer tick.Stop()
	for {
		if n := s.uploads.sweep(); n > 0 {
			s.log.InfoContext(ctx, "idle uploads removed", "uploads", n)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Close releases the folder of uploads; no other method may be called after it.
func (s *Store) Close() error { return s.uploads.dir.Close() }

func (us *uploads) open(u *upload) (*os.File, error) {
	f, err := us.dir.OpenFile(u.id, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open upload %s: %w", filepath.Join(us.path, u.id), err)
	}
	return f, nil
}

// receive stores a part at the end of an upload. Only who has acquired the upload
// calls it, so nobody else changes its size. Room for a part of known length is
// taken before its first byte, so that two do not keep each other from their ends.
func (us *uploads) receive(u *upload, f *os.File, p Part) error {
	if p.Body == nil {
		return nil
	}
	if p.At >= 0 && p.At != u.size {
		return fmt.Errorf("%w: the part starts at %d, stored are %d bytes", ErrUploadRange, p.At, u.size)
	}
	if p.Size > us.cfg.MaxBlob-u.size {
		return us.tooLarge()
	}
	start := u.size
	if p.Size > 0 {
		if err := us.reserve(u, p.Size); err != nil {
			return err
		}
		defer func() { us.giveBack(u, start+p.Size-u.size) }()
	}
	buf := receiveBuffers.Get().(*[receiveStep]byte)
	defer receiveBuffers.Put(buf)
	for {
		n, err := fill(p.Body, buf[:])
		if werr := us.write(u, f, buf[:n], p, start); werr != nil {
			return werr
		}
		got := u.size - start
		switch {
		case err == io.EOF && p.Size >= 0 && got != p.Size:
			return fmt.Errorf("%w: the part has %d bytes, announced were %d", ErrSizeInvalid, got, p.Size)
		case err == io.EOF:
			return nil
		case err != nil:
			return fmt.Errorf("%w: it broke off after %d bytes: %w", ErrBody, got, err)
		}
	}
}

// fill reads until p is full or the reader says why not. Unlike io.ReadFull it
// tells the end of a body from one that broke off.
func fill(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}

// write stores one piece of a part that began at start.
func (us *uploads) write(u *upload, f *os.File, piece []byte, p Part, start int64) error {
	size := int64(len(piece))
	if u.size+size > us.cfg.MaxBlob {
		return us.tooLarge()
	}
	if p.Size >= 0 && u.size-start+size > p.Size {
		return fmt.Errorf("%w: the part has more than the %d bytes announced", ErrSizeInvalid, p.Size)
	}
	if p.Size < 0 {
		if err := us.reserve(u, size); err != nil {
			return err
		}
	}
	n, err := f.WriteAt(piece, headerSize+u.size)
	us.wrote(u, int64(n))
	if p.Size < 0 {
		us.giveBack(u, size-int64(n))
	}
	if err != nil {
		return fmt.Errorf("write upload %s: %w", filepath.Join(us.path, u.id), err)
	}
	return nil
}

func (us *uploads) tooLarge() error {
	return fmt.Errorf("%w: a blob may have %d bytes", ErrTooLarge, us.cfg.MaxBlob)
}

// sync makes what was received durable, and the file's name the first time.
func (us *uploads) sync(u *upload, f *os.File) error {
	err := f.Sync()
	if err == nil && !u.named {
		err = durable.SyncDir(us.dir, ".")
		u.named = err == nil
	}
	if err != nil {
		return fmt.Errorf("sync upload %s: %w", filepath.Join(us.path, u.id), err)
	}
	return nil
}
