package packed

import (
	"context"
	"errors"
	"fmt"
	"io"

	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// saltRoom is how many chunks of a pack are left free for salted.
const saltRoom = 16

// keep makes a complete pack durable in the bucket and then calls commit. A pack whose
// id was deleted for good gets another one. It returns the pack that was stored, and
// closes the files of others.
func (s *Store) keep(ctx context.Context, l *looks, p *sealed, commit func(*sealed) error) (*sealed, error) {
	for {
		if s.catalog.IsPackDeleted(p.id) {
			other, err := s.salted(p)
			p.file.Close() // it was only read
			if err != nil {
				return nil, err
			}
			p = other
			continue
		}
		if err := s.bucket.Put(ctx, pack.Key(p.id), p.file, p.size); err != nil {
			p.file.Close()
			return nil, fmt.Errorf("store pack %s: %w", p.id, err)
		}
		l.stored(p.id, p.size)
		err := commit(p)
		if errors.Is(err, catalog.ErrPackDeleted) {
			continue // by gc, since it was asked above
		}
		if err != nil {
			p.file.Close()
			return nil, err
		}
		return p, nil
	}
}

// salted returns a pack with the same chunks and one more, which makes it another
// pack. Its content names the pack it must not be, so that the same writes still make
// the same packs.
func (s *Store) salted(p *sealed) (*sealed, error) {
	f, err := tempFile(s.cfg.TmpDir)
	if err != nil {
		return nil, fmt.Errorf("begin pack in %s: %w", s.cfg.TmpDir, explain(err))
	}
	q, err := p.saltInto(pack.NewWriter(f))
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("write pack in %s: %w", s.cfg.TmpDir, explain(err))
	}
	q.file = f
	return q, nil
}

func (p *sealed) saltInto(w *pack.Writer) (*sealed, error) {
	var stored []byte
	for _, e := range p.entries {
		stored = grown(stored, int(e.Stored))
		if _, err := p.file.ReadAt(stored, e.Off); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if _, err := w.Add(e.Digest, e.Codec, e.Len, stored); err != nil {
			return nil, err
		}
	}
	salt := []byte("this pack is not " + p.id.String() + "\n")
	if _, err := w.Add(chunk.Sum(salt), pack.Raw, uint32(len(salt)), salt); err != nil {
		return nil, err
	}
	id, size, err := w.Close()
	return &sealed{id: id, size: size, entries: w.Entries()}, err
}
