package cache

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"quarry/store/chunk"
)

// pinned is a pinned image.
type pinned struct {
	chunks []Chunk
	file   int64 // bytes of its list on the disk
}

// pins says how many images pin a chunk, and the length the first one gave.
type pins struct {
	images int
	len    uint32
}

// Pinned describes a pinned image.
type Pinned struct {
	Image  chunk.Digest
	Chunks int   // in its list, each once
	Bytes  int64 // their plain bytes
	// Cached is how many of the chunks are in the cache now, and CachedBytes their
	// bytes.
	Cached      int
	CachedBytes int64
}

// PinLimitError says that an image cannot be pinned because pinned chunks, or
// their lists, would take more of the cache than may be pinned.
type PinLimitError struct {
	Image chunk.Digest
	Need  int64 // bytes pinned with it
	Max   int64
	Limit int64 // of the whole cache
	Lists bool  // it is the lists that are too large
}

func (e *PinLimitError) Error() string {
	what := "chunks"
	if e.Lists {
		what = "lists of chunks"
	}
	return fmt.Sprintf("pin image %s: pinned %s would take %d bytes, and of a disk cache of %d bytes at most %d can be; unpin another image or raise the limit",
		e.Image, what, e.Need, e.Limit, e.Max)
}

// Pin has the chunks of an image stay in the cache once they are there, until
// Unpin, over restarts too; it brings none. It is durable on nil. Pinning an
// image again changes its list. Errors: *PinLimitError; those of the disk.
func (c *Cache) Pin(image chunk.Digest, chunks []Chunk) error {
	chunks = slices.Clone(chunks)
	slices.SortFunc(chunks, func(a, b Chunk) int { return bytes.Compare(a.Digest[:], b.Digest[:]) })
	chunks = slices.CompactFunc(chunks, func(a, b Chunk) bool { return a.Digest == b.Digest })
	if err := validChunks(chunks); err != nil {
		return fmt.Errorf("pin image %s: %w", image, err)
	}
	c.pinMu.Lock()
	defer c.pinMu.Unlock()
	list := encodePin(image, chunks)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("pin image %s: %w", image, errClosed)
	}
	old := c.images[image]
	if old != nil && slices.Equal(old.chunks, chunks) {
		c.mu.Unlock()
		return nil
	}
	c.unpin(image)
	err := c.pin(image, &pinned{chunks, align(int64(len(list)))})
	if err != nil && old != nil {
		c.pin(image, old) // it did fit
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err := c.writePin(image, list); err != nil {
		c.mu.Lock()
		c.unpin(image)
		c.mu.Unlock()
		return fmt.Errorf("pin image %s: %w", image, err)
	}
	return nil
}

// writePin writes a list to the disk.
func (c *Cache) writePin(image chunk.Digest, list []byte) error {
	f, err := c.fs.Open(pinName(image), Create)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(list, 0); err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		c.fs.Remove(pinName(image))
	}
	return err
}

// Unpin ends the pin of an image, if there is one.
func (c *Cache) Unpin(image chunk.Digest) error {
	c.pinMu.Lock()
	defer c.pinMu.Unlock()
	c.mu.Lock()
	there := c.unpin(image)
	c.mu.Unlock()
	if !there {
		return nil
	}
	if err := c.fs.Remove(pinName(image)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin image %s: %w", image, err)
	}
	return nil
}

// Pinned lists the pinned images, by id.
func (c *Cache) Pinned() []Pinned {
	c.mu.RLock()
	defer c.mu.RUnlock()
	list := []Pinned{}
	for id, img := range c.images {
		p := Pinned{Image: id, Chunks: len(img.chunks)}
		for _, ch := range img.chunks {
			p.Bytes += int64(ch.Len)
			if c.pending[ch.Digest] != nil || c.t.get(ch.Digest).seg != 0 {
				p.Cached++
				p.CachedBytes += int64(ch.Len)
			}
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b Pinned) int { return bytes.Compare(a.Image[:], b.Image[:]) })
	return list
}

// pin counts an image's pins, unless they are too many; mu is held.
func (c *Cache) pin(image chunk.Digest, p *pinned) error {
	if n := c.pinFiles + p.file; n > c.sizes.pinLists {
		return &PinLimitError{image, n, c.sizes.pinLists, c.sizes.limit, true}
	}
	n := c.pinnedBytes
	for _, ch := range p.chunks {
		if c.pins[ch.Digest].images == 0 {
			n += align(int64(ch.Len))
		}
	}
	if n > c.sizes.pinned {
		return &PinLimitError{image, n, c.sizes.pinned, c.sizes.limit, false}
	}
	for _, ch := range p.chunks {
		have := c.pins[ch.Digest]
		if have.images == 0 {
			have.len = ch.Len
		}
		have.images++
		c.pins[ch.Digest] = have
	}
	c.images[image], c.pinnedBytes = p, n
	c.pinFiles += p.file
	return nil
}

// unpin takes an image's pins back; mu is held.
func (c *Cache) unpin(image chunk.Digest) bool {
	p := c.images[image]
	if p == nil {
		return false
	}
	for _, ch := range p.chunks {
		have := c.pins[ch.Digest]
		if have.images--; have.images > 0 {
			c.pins[ch.Digest] = have
			continue
		}
		delete(c.pins, ch.Digest)
		c.pinnedBytes -= align(int64(have.len))
	}
	delete(c.images, image)
	c.pinFiles -= p.file
	return true
}

// loadPins reads the lists of pinned images. One that is damaged, or that a
// lower limit has no room for, is deleted; the smaller ones come first.
func (w *writer) loadPins(lists []FileInfo) {
	c := w.c
	slices.SortFunc(lists, func(a, b FileInfo) int {
		return cmp.Or(cmp.Compare(a.Size, b.Size), cmp.Compare(a.Name, b.Name))
	})
	for _, f := range lists {
		id, ok := pinOf(f.Name)
		if !ok {
			continue // not ours
		}
		if err := w.loadPin(id, f); err != nil {
			c.log.Warn("pin of an image deleted", "image", id, "err", err)
			w.remove(f.Name)
		}
	}
}

func (w *writer) loadPin(id chunk.Digest, f FileInfo) error {
	if f.Size > maxPin {
		return fmt.Errorf("list of %d bytes", f.Size)
	}
	b, err := w.read(f.Name, f.Size)
	if err != nil {
		return err
	}
	chunks, err := decodePin(b, id)
	if err != nil {
		return err
	}
	return w.c.pin(id, &pinned{chunks, align(f.Size)})
}
