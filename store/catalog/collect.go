package catalog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"quarry/store/chunk"
)

// ErrPackDeleted says that a pack's object was deleted, or may be at any moment, so
// that nothing may be stored under its id again.
var ErrPackDeleted = errors.New("the pack was deleted for good")

// ClockStep is how exactly the journal knows when a name was bound or left an image:
// a clock entry is made before a change when the last one is further off.
const ClockStep = time.Hour

// Clock is what the writer's clock says. All that is decided by it is how long the
// images of moved and deleted names are kept for people.
type Clock struct {
	Unix int64 `json:"unix"` // seconds
}

// PackCondemned says that gc empties a pack: no chunk in it counts as stored any
// more, though all are read as before. An added pack of the same id is so no longer.
type PackCondemned struct {
	ID chunk.Digest `json:"pack"`
}

// PackDeleted comes before the object of a pack that is not in the catalog is
// deleted. Its id is never used again: the one who deletes it may be stopped for
// hours between this entry and the deletion.
type PackDeleted struct {
	ID chunk.Digest `json:"pack"`
}

// ImageDeleted comes before the statements of a source are deleted.
type ImageDeleted struct {
	Source chunk.Digest `json:"source"`
}

// Pinned says that the images of a source stay, whether they have a name or not.
type Pinned struct {
	Source chunk.Digest `json:"source"`
}

// Unpinned takes a Pinned back.
type Unpinned struct {
	Source chunk.Digest `json:"source"`
}

func (Clock) kind() string         { return "clock" }
func (PackCondemned) kind() string { return "pack_condemned" }
func (PackDeleted) kind() string   { return "pack_deleted" }
func (ImageDeleted) kind() string  { return "image_deleted" }
func (Pinned) kind() string        { return "pinned" }
func (Unpinned) kind() string      { return "unpinned" }

// decodeCollect is decodeFields for the types of this file.
func decodeCollect(kind string, fields []byte) (Entry, error) {
	switch kind {
	case Clock{}.kind():
		return decode[Clock](fields)
	case PackCondemned{}.kind():
		return decode[PackCondemned](fields)
	case PackDeleted{}.kind():
		return decode[PackDeleted](fields)
	case ImageDeleted{}.kind():
		return decode[ImageDeleted](fields)
	case Pinned{}.kind():
		return decode[Pinned](fields)
	case Unpinned{}.kind():
		return decode[Unpinned](fields)
	}
	return nil, errors.New("unknown entry type") // a new one would have a new version
}

func (e Clock) validate() error {
	if e.Unix <= 0 {
		return fmt.Errorf("time %d is not after 1970", e.Unix)
	}
	return nil
}
func (e PackCondemned) validate() error { return validDigest("pack", e.ID) }
func (e PackDeleted) validate() error   { return validDigest("pack", e.ID) }
func (e ImageDeleted) validate() error  { return validDigest("source", e.Source) }
func (e Pinned) validate() error        { return validDigest("source", e.Source) }
func (e Unpinned) validate() error      { return validDigest("source", e.Source) }

func (Clock) follows(*state) error { return nil }

// apply dates what happened before the first clock entry to that.
func (e Clock) apply(s *state) {
	if s.clock == 0 {
		for source := range s.left {
			s.left[source] = e.Unix
		}
		for k, n := range s.names {
			n.since = e.Unix
			s.names[k] = n
		}
	}
	s.clock = e.Unix
}

func (e PackCondemned) follows(s *state) error {
	if _, ok := s.packs[e.ID]; !ok {
		return fmt.Errorf("condemned pack %s is not in the catalog", e.ID)
	}
	return nil
}

func (e PackCondemned) apply(s *state) {
	p := s.packs[e.ID]
	p.emptied = true
	s.packs[e.ID] = p
}

func (e PackDeleted) follows(s *state) error {
	if _, ok := s.packs[e.ID]; ok {
		return fmt.Errorf("deleted pack %s is in the catalog", e.ID)
	}
	return nil
}

func (e PackDeleted) apply(s *state) { s.deleted[e.ID] = struct{}{} }

func (ImageDeleted) follows(*state) error { return nil }

func (e ImageDeleted) apply(s *state) { delete(s.left, e.Source) }

func (Pinned) follows(*state) error { return nil }

func (e Pinned) apply(s *state) { s.pins[e.Source] = struct{}{} }

func (e Unpinned) follows(s *state) error {
	if _, ok := s.pins[e.Source]; !ok {
		return fmt.Errorf("source %s is not pinned", e.Source)
	}
	return nil
}

func (e Unpinned) apply(s *state) {
	delete(s.pins, e.Source)
	s.left[e.Source] = s.clock
}

// CondemnPack says that gc empties the pack. One that is not in the catalog is not
// an error.
func (c *Catalog) CondemnPack(ctx context.Context, id chunk.Digest) error {
	return c.change(ctx, "condemn pack "+id.String(), func(s *state) Entry {
		if p, ok := s.packs[id]; !ok || p.emptied {
			return nil
		}
		return PackCondemned{ID: id}
	})
}

// DeletePack says that the object of a pack that is not in the catalog is about to
// be deleted. The caller deletes it when this has returned nil, also when it was said
// before: then the deletion may not have been done.
func (c *Catalog) DeletePack(ctx context.Context, id chunk.Digest) error {
	return c.change(ctx, "delete pack "+id.String(), func(s *state) Entry {
		if _, ok := s.deleted[id]; ok {
			return nil
		}
		return PackDeleted{ID: id}
	})
}

// DeleteImage says that the statements of a source are about to be deleted.
func (c *Catalog) DeleteImage(ctx context.Context, source chunk.Digest) error {
	return c.change(ctx, "delete image "+source.String(), func(*state) Entry { return ImageDeleted{Source: source} })
}

// Pin keeps the images of a source. To pin what is pinned is not an error.
func (c *Catalog) Pin(ctx context.Context, source chunk.Digest) error {
	return c.change(ctx, "pin "+source.String(), func(s *state) Entry {
		if _, ok := s.pins[source]; ok {
			return nil
		}
		return Pinned{Source: source}
	})
}

// Unpin takes a Pin back, or returns ErrNotFound.
func (c *Catalog) Unpin(ctx context.Context, source chunk.Digest) error {
	var notFound error
	err := c.tick(ctx)
	if err != nil {
		return err
	}
	err = c.change(ctx, "unpin "+source.String(), func(s *state) Entry {
		if _, ok := s.pins[source]; !ok {
			notFound = fmt.Errorf("source %s is not pinned: %w", source, ErrNotFound)
			return nil
		}
		return Unpinned{Source: source}
	})
	return errors.Join(err, notFound)
}

// tick notes the time when that noted last is more than ClockStep off.
func (c *Catalog) tick(ctx context.Context) error {
	if c.clock == nil {
		return nil
	}
	due := func(s *state) bool {
		off := c.clock().Unix() - s.clock
		return off < 0 || off >= int64(ClockStep/time.Second)
	}
	c.mu.RLock()
	isDue := due(c.state)
	c.mu.RUnlock()
	if !isDue {
		return nil
	}
	return c.change(ctx, "note the time", func(s *state) Entry {
		if !due(s) {
			return nil
		}
		return Clock{Unix: c.clock().Unix()}
	})
}

// IsPackCondemned says whether gc empties the pack.
func (c *Catalog) IsPackCondemned(id chunk.Digest) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.packs[id].emptied
}

// IsPackDeleted says whether the object of that pack was deleted for good.
func (c *Catalog) IsPackDeleted(id chunk.Digest) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	_, ok := c.state.deleted[id]
	return ok
}

// Pins returns the pinned sources, sorted.
func (c *Catalog) Pins() []chunk.Digest {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(c.state.pins), compareDigests)
}

// Left returns the sources that a name or a pin had and has no longer, and when they
// were left last: no earlier than that, and up to ClockStep later. They may have other
// names. Those whose images were deleted are not among them.
func (c *Catalog) Left() map[chunk.Digest]time.Time {
	c.mu.RLock()
	defer c.mu.RUnlock()
	left := make(map[chunk.Digest]time.Time, len(c.state.left))
	for source, unix := range c.state.left {
		left[source] = time.Unix(unix, 0)
	}
	return left
}

// NameSince returns when the name was bound to what it is bound to, as Left does;
// zero when there is no such name, or nobody knows.
func (c *Catalog) NameSince(repo, tag string) time.Time {
	c.mu.RLock()
	defer c.mu.RUnlock()
	n, ok := c.state.names[nameKey{repo, tag}]
	if !ok || n.deleted || n.since == 0 {
		return time.Time{}
	}
	return time.Unix(n.since, 0)
}

func compareDigests(x, y chunk.Digest) int { return bytes.Compare(x[:], y[:]) }
