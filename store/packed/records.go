package packed

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/pack"
)

const (
	// minExtent is what the extents of a batch have on average at least to be sent as
	// files: below it reading neighbours with the gaps between them costs as little.
	minExtent = 32 << 10
	// maxBatchFiles bounds the packs that one batch is sent from.
	maxBatchFiles = 16
	// maxSendFiles bounds the files that are open for batches, of which each has one at
	// least. A batch that finds no room is read.
	maxSendFiles = 2048
)

// Records are chunks as the records of packs, in files of this machine, for who sends
// them as they are. Nobody has read them: neither checksum nor digest was compared, and
// the reader who finds a chunk wrong asks for it in a way that does.
type Records struct {
	Missing []chunk.Digest // asked for and not in the store
	Count   int            // of the chunks that Extents have
	Size    int64          // of the Extents
	// Extents are whole records each, and together all chunks that are not Missing.
	Extents []Extent
}

// Extent is a part of a pack.
type Extent struct {
	File      *os.File // others use it too: read it at offsets
	Off, Size int64
}

// StoredRecords is StoredBatch for who can send files. Where the chunks lie one after
// another in files it calls send, once, and fn not at all; the files are closed when
// send returns. Otherwise it is StoredBatch.
func (s *Store) StoredRecords(ctx context.Context, ds []chunk.Digest, send func(*Records) error, fn func(chunk.Digest, Stored, error) error) error {
	found, missing, err := s.locateAll(ctx, ds)
	if err != nil {
		return err
	}
	if files, ok := s.cfg.Bucket.(bucket.Files); ok && s.cfg.Ranges == nil {
		found = inOrder(found)
		if sent, err := s.sendRecords(ctx, files, found, missing, send); sent {
			return err
		}
	}
	return s.readFound(ctx, found, missing, giveStored(fn))
}

// sendRecords calls send, unless the chunks are better read, or must be because what
// the index says of a pack is not so.
func (s *Store) sendRecords(ctx context.Context, files bucket.Files, found []wanted, missing []chunk.Digest, send func(*Records) error) (sent bool, err error) {
	parts, packs := extents(found)
	r := &Records{Missing: missing, Count: len(found), Extents: make([]Extent, len(parts))}
	for _, p := range parts {
		r.Size += p.size
	}
	if len(parts) == 0 || r.Size < s.cfg.MinExtent*int64(len(parts)) || packs > maxBatchFiles || !s.sends.TryAcquire(int64(packs)) {
		return false, nil
	}
	defer s.sends.Release(int64(packs))
	var last *os.File // of the part before
	for i, p := range parts {
		if i == 0 || p.pack != parts[i-1].pack {
			if last, err = files.File(ctx, pack.Key(p.pack)); err != nil {
				return false, nil // who reads it says why not
			}
			defer last.Close()
		}
		r.Extents[i] = Extent{last, p.off, p.size}
		// What is not in the page cache comes while the extents before it are sent.
		_ = unix.Fadvise(int(last.Fd()), p.off, p.size, unix.FADV_WILLNEED)
		// In a pack the extents rise: the last one tells whether it is cut off.
		if i == len(parts)-1 || parts[i+1].pack != p.pack {
			if info, err := last.Stat(); err != nil || info.Size() < p.off+p.size {
				return false, nil
			}
		}
	}
	for _, p := range parts {
		s.metrics.used("file", p.size)
	}
	s.metrics.readChunks.Add(float64(r.Count))
	bucket.Count(ctx, r.Size)
	return true, send(r)
}

// extents joins chunks, which are in order, whose records lie one after another.
func extents(ws []wanted) (parts []rangeKey, packs int) {
	for _, w := range ws {
		off, size := w.loc.Off-pack.RecordHeaderSize, pack.RecordHeaderSize+int64(w.loc.Stored)
		n := len(parts) - 1
		if n >= 0 && parts[n].pack == w.loc.Pack && parts[n].off+parts[n].size == off {
			parts[n].size += size
			continue
		}
		if n < 0 || parts[n].pack != w.loc.Pack {
			packs++
		}
		parts = append(parts, rangeKey{pack: w.loc.Pack, off: off, size: size})
	}
	return parts, packs
}
