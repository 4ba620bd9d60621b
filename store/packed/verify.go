package packed

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// verdict is what reading a whole pack told.
type verdict struct {
	id        chunk.Digest    // of the bytes as they are
	bad       map[int64]error // by offset of the stored bytes
	structure error           // damage of header and record headers
}

// verifyPack reads a pack once, from front to back, and verifies every chunk.
func (s *Store) verifyPack(ctx context.Context, id chunk.Digest, size int64, entries []pack.Entry) (verdict, error) {
	v := verdict{bad: map[int64]error{}}
	sum := sha256.New()
	r := bufio.NewReaderSize(io.TeeReader(io.NewSectionReader(s.object(ctx, id), 0, size), sum), maxRange)
	buf := grown(nil, pack.HeaderSize)
	if _, err := io.ReadFull(r, buf); err != nil {
		err = cutOff(&v, err)
		return v, err
	}
	v.structure = pack.CheckHeader(buf)
	var plain []byte
	for _, e := range entries { // they lie one after another
		buf = grown(buf, pack.RecordHeaderSize+int(e.Stored))
		if _, err := io.ReadFull(r, buf); err != nil {
			v.bad[e.Off] = err
			err = cutOff(&v, err)
			return v, err
		}
		head, stored := buf[:pack.RecordHeaderSize], buf[pack.RecordHeaderSize:]
		if got, err := pack.DecodeRecordHeader(head, e.Off-pack.RecordHeaderSize); err != nil {
			v.structure = errors.Join(v.structure, err)
		} else if got != e {
			v.structure = errors.Join(v.structure, fmt.Errorf("record at %d and footer differ", e.Off))
		}
		var err error
		if plain, err = verifyStored(plain, e.Digest, chunkindex.At(id, e), stored); err != nil {
			v.bad[e.Off] = err
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		err = cutOff(&v, err)
		return v, err
	}
	v.id = chunk.Digest(sum.Sum(nil))
	return v, nil
}

// cutOff notes a pack that ended early in the verdict; another error of reading
// is returned.
func cutOff(v *verdict, err error) error {
	if !isDamage(err) && !errors.Is(err, io.EOF) {
		return err
	}
	v.structure = errors.Join(v.structure, fmt.Errorf("pack ends early: %w", io.ErrUnexpectedEOF))
	return nil
}

// verifyStored checks stored bytes by checksum and digest; dst is scratch space
// and returned for the next call.
func verifyStored(dst []byte, d chunk.Digest, loc chunkindex.Location, stored []byte) ([]byte, error) {
	if got := pack.Checksum(stored); got != loc.CRC {
		return dst, fmt.Errorf("stored bytes have checksum %08x, want %08x", got, loc.CRC)
	}
	plain, err := pack.Decode(dst, loc.Codec, stored, loc.Len)
	if err != nil {
		return dst, err
	}
	if got := chunk.Sum(plain); got != d {
		return plain, fmt.Errorf("content has digest %s", got)
	}
	return plain, nil
}

// repair makes the object of pack id, and its size in the journal, what they
// were. got and size are of the object as it is. When its digest is right, only
// the journal can be wrong.
func (s *Store) repair(ctx context.Context, id, got chunk.Digest, size int64, entries []pack.Entry) error {
	if got != id {
		var err error
		if size, err = s.rewrite(ctx, id, entries); err != nil {
			return err
		}
	}
	return s.catalog.CorrectPack(ctx, id, size)
}

// rewrite writes a pack again from its chunks, all of which were verified, and
// returns its size. The digest proves that the result is the pack as it was;
// only then it replaces the object.
func (s *Store) rewrite(ctx context.Context, want chunk.Digest, entries []pack.Entry) (int64, error) {
	f, err := tempFile(s.cfg.TmpDir)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	w := pack.NewWriter(f)
	var stored []byte
	for _, e := range entries {
		stored = grown(stored, int(e.Stored))
		if err := s.bucket.ReadAt(ctx, pack.Key(want), stored, e.Off); err != nil {
			return 0, err
		}
		if _, err := w.Add(e.Digest, e.Codec, e.Len, stored); err != nil {
			return 0, err
		}
	}
	id, size, err := w.Close()
	if err != nil {
		return 0, err
	}
	if id != want {
		return 0, fmt.Errorf("rewritten pack is %s, want %s", id, want)
	}
	return size, s.bucket.Put(ctx, pack.Key(want), f, size)
}

// tempFile returns a file that has no name: whatever ends the process, nothing
// is left of it.
func tempFile(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "pack-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
