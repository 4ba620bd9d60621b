package packed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// openPack is a pack being filled.
type openPack struct {
	*pack.Writer
	file *os.File
}

// sealed is a pack that is complete in its file.
type sealed struct {
	file    *os.File
	id      chunk.Digest
	size    int64
	entries []pack.Entry
}

// pack is the packer stage: it writes batches in order into packs and hands full
// packs to the committer.
func (w *write) pack(ctx context.Context) error {
	defer close(w.sealed)
	var p *openPack
	defer func() {
		if p != nil {
			p.file.Close()
		}
	}()
	err := each(ctx, w.order, func(ctx context.Context, b *batch) error {
		select {
		case <-b.ready:
		case <-ctx.Done():
			return ctx.Err()
		}
		var known []chunk.Digest
		for i := range b.items {
			it := &b.items[i]
			if it.known {
				known = append(known, it.digest)
				continue
			}
			if err := w.addTo(ctx, &p, it); err != nil {
				return err
			}
		}
		w.forget(known)
		b.plain, b.frames, b.items = b.plain[:0], b.frames[:0], b.items[:0]
		w.free <- b
		return nil
	})
	if err != nil || p == nil {
		return err
	}
	return w.seal(ctx, &p)
}

// addTo adds a chunk to the pack *p, which is nil between packs.
func (w *write) addTo(ctx context.Context, p **openPack, it *item) error {
	if *p == nil {
		if err := w.s.index.Room(); err != nil {
			return fmt.Errorf("begin pack: %w", err)
		}
		f, err := tempFile(w.s.cfg.TmpDir)
		if err != nil {
			return fmt.Errorf("begin pack in %s: %w", w.s.cfg.TmpDir, explain(err))
		}
		*p = &openPack{pack.NewWriter(f), f}
	}
	e, err := (*p).Add(it.digest, it.codec, uint32(it.size), it.stored)
	if err != nil {
		return fmt.Errorf("write pack in %s: %w", w.s.cfg.TmpDir, explain(err))
	}
	w.made.chunks++
	w.made.digests = append(w.made.digests, it.digest)
	w.made.plainBytes += int64(e.Len)
	w.made.storedBytes += int64(e.Stored)
	if (*p).Size() < w.s.cfg.PackSize && (*p).Count() < pack.MaxCount-saltRoom {
		return nil
	}
	return w.seal(ctx, p)
}

// explain says what to do about a full disk.
func explain(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w; nothing was stored, free space and try again", err)
	}
	return err
}

// seal completes the pack *p and hands its file on.
func (w *write) seal(ctx context.Context, p **openPack) error {
	id, size, err := (*p).Close()
	if err != nil {
		return fmt.Errorf("write pack in %s: %w", w.s.cfg.TmpDir, explain(err))
	}
	select {
	case w.sealed <- &sealed{(*p).file, id, size, (*p).Entries()}:
		*p = nil
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// commit is the committer stage. The order is what a crash depends on: the pack
// is durable in the bucket before the journal names it, and the journal names it
// before the index points into it.
func (w *write) commit(ctx context.Context, p *sealed) error {
	p, err := w.s.keep(ctx, w.looks, p, func(p *sealed) error { return w.s.commit(ctx, w.looks, p) })
	if err != nil {
		return err
	}
	defer p.file.Close()
	w.s.metrics.packs.Inc()
	w.s.log.DebugContext(ctx, "pack stored", "pack", p.id, "size", p.size, "chunks", len(p.entries))
	w.forget(digestsOf(p.entries))
	return nil
}
