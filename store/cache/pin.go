package cache

import (
	"bytes"
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
	Image chunk.Digest // zero: the cache cannot be opened with this limit
	Need  int64        // bytes pinned with it
	Max   int64
	Limit int64 // of the whole cache
	Lists bool  // it is the lists that are too large
}

func (e *PinLimitError) Error() string {
	what := "chunks"
	if e.Lists {
		what = "lists of chunks"
	}
	if e.Image.IsZero() {
		return fmt.Sprintf("the %s that are pinned take %d bytes, and of a disk cache of %d bytes at most %d can be; choose a larger --cache-size", what, e.Need, e.Limit, e.Max)
	}
	return fmt.Sprintf("pin image %s: pinned %s would take %d bytes, and of a disk cache of %d bytes at most %d can be (%d %%); unpin another image or choose a larger --cache-size",
		e.Image, what, e.Need, e.Limit, e.Max, e.Max*100/e.Limit)
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
		c.countPin(image, old) // it was there
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
	c.unpin(image)
	c.mu.Unlock()
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
	c.countPin(image, p)
	return nil
}

// countPin counts an image's pins; mu is held.
func (c *Cache) countPin(image chunk.Digest, p *pinned) {
	for _, ch := range p.chunks {
		have := c.pins[ch.Digest]
		if have.images == 0 {
			have.len = ch.Len
			c.pinnedBytes += align(int64(ch.Len))
		}
		have.images++
		c.pins[ch.Digest] = have
	}
	c.images[image] = p
	c.pinFiles += p.file
}

// unpin takes an image's pins back; mu is held.
func (c *Cache) unpin(image chunk.Digest) {
	p := c.images[image]
	if p == nil {
		return
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
}

// maxKeptLists is the part of the limit, a quarter, that lists of pins may take
// which a higher limit let in: the rest is 11 units at the lowest limit, and an
// eviction needs five (see sizesOf).
const maxKeptLists = 4

// loadPins reads the lists of pinned images. One that is damaged is deleted, and
// no other: what is pinned beyond today's limit stays pinned, and is cached as far
// as there is room.
func (w *writer) loadPins(lists []FileInfo) error {
	c := w.c
	for _, f := range lists {
		id, ok := pinOf(f.Name)
		if !ok {
			continue // not ours
		}
		damaged, err := w.loadPin(id, f)
		switch {
		case damaged:
			c.log.Warn("damaged list of a pinned image deleted", "image", id, "err", err)
			w.remove(f.Name)
		case err != nil:
			c.log.Warn("list of a pinned image cannot be read: it is not pinned now", "image", id, "err", err)
			c.pinFiles += align(f.Size)
		}
	}
	if most := c.sizes.limit / maxKeptLists; c.pinFiles > most {
		return &PinLimitError{Need: c.pinFiles, Max: most, Limit: c.sizes.limit, Lists: true}
	}
	if c.pinnedBytes > c.sizes.pinned || c.pinFiles > c.sizes.pinLists {
		c.log.Warn("more is pinned than this limit keeps: all stays pinned, and what is evicted of it is fetched again when it is read; end pins with quarry pull --unpin, or choose a larger --cache-size",
			"pinned_bytes", c.pinnedBytes, "max_pinned_bytes", c.sizes.pinned, "limit_bytes", c.sizes.limit)
	}
	return nil
}

// loadPin takes the list of an image in, whatever it takes.
func (w *writer) loadPin(id chunk.Digest, f FileInfo) (damaged bool, err error) {
	if f.Size > maxPin {
		return true, fmt.Errorf("list of %d bytes", f.Size)
	}
	b, err := w.read(f.Name, f.Size)
	if err != nil {
		return false, err
	}
	chunks, err := decodePin(b, id)
	if err != nil {
		return true, err
	}
	w.c.countPin(id, &pinned{chunks, align(f.Size)})
	return false, nil
}
