// Package catalog keeps what a store consists of: its packs, the chunks in them
// that must not be used, and the names of its images. It is the sum of the
// entries of the bucket's journal, so that it survives the loss of every other
// local file, and so that of two writers the second is found out.
package catalog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	"quarry/store/bucket"
	"quarry/store/chunk"
)

var (
	// ErrFenced says that another writer appended to the journal. This catalog
	// no longer knows the store and refuses every change.
	ErrFenced = errors.New("another writer owns this store now; what this one acknowledged is kept, and it writes no more until it is started again")
	// ErrStale says that a name's serial is not above all that were used for it.
	ErrStale = errors.New("stale serial")
	// ErrDamaged says that an entry of the journal is not what was written, or is
	// missing.
	ErrDamaged = errors.New("the journal is damaged, packs and images are not: restore the file of that entry, in the folder log of the bucket, from a backup")
	// ErrNotFound says that there is no such name.
	ErrNotFound = errors.New("name not found")
)

const (
	// resolveTimeout bounds how long an append whose outcome is unknown is looked
	// for in the journal, also when its caller has gone: ten times a slow S3 read.
	resolveTimeout = 10 * time.Second
	// maxDoubts bounds the appends of one number that are remembered because they
	// may still arrive. One that was forgotten and arrives fences the catalog,
	// which is safe.
	maxDoubts = 16
)

// Config is what a catalog needs.
type Config struct {
	Journal bucket.Journal
	Log     *slog.Logger // nil: discard
	// Writer is who changes the catalog: its epoch is in the journal before its first
	// change. nil: changes are made without an epoch, by the only user of a journal.
	Writer *Writer
	Now    func() time.Time // for the time in the epoch, which people read; nil: time.Now
	// Clock dates names that are bound, moved and deleted, so that gc keeps their images
	// for a while; nil: they have no dates.
	Clock func() time.Time
}

// Catalog is the replayed journal. All methods are safe for concurrent use; what
// reading methods return is a copy of the state at one moment.
type Catalog struct {
	journal bucket.Journal
	log     *slog.Logger
	writer  *Writer
	now     func() time.Time
	clock   func() time.Time // nil: no dates

	// appending is held while an entry is made, appended and applied; it guards
	// the fields below it, and only its holder changes state.
	appending sync.Mutex
	next      uint64         // number of the next entry; written with mu held too
	last      chunk.Digest   // of the bytes of the entry before it
	doubts    []chunk.Digest // of own entries that may be, or become, entry next
	fenced    error          // set for good once another writer was seen
	fencedCh  chan struct{}  // closed then

	mu    sync.RWMutex // guards state; never held while waiting for the journal
	state *state
}

// Open replays the journal. An entry it does not know, or that cannot follow on
// those before it, is an error with the entry's number: ErrDamaged, unless a
// newer quarry may have written it.
func Open(ctx context.Context, cfg Config) (*Catalog, error) {
	c := &Catalog{
		journal: cfg.Journal, log: cfg.Log, writer: cfg.Writer, now: cfg.Now, clock: cfg.Clock,
		next: 1, state: newState(), fencedCh: make(chan struct{}),
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	for raw, err := range cfg.Journal.Read(ctx, 1) {
		if err == nil {
			_, err = c.take(raw.Data)
		} else {
			err = damagedJournal(err)
		}
		if err != nil {
			return nil, fmt.Errorf("open catalog: %w", err)
		}
	}
	c.log.InfoContext(ctx, "catalog opened", "entries", c.next-1, "packs", len(c.state.packs), "epoch", c.state.epoch.N)
	return c, nil
}

// take applies the bytes of the next entry, which somebody else wrote. Errors:
// ErrDamaged, and ErrNewer when a newer quarry may have written it.
func (c *Catalog) take(b []byte) (Entry, error) {
	e, err := DecodeEntry(b)
	if err == nil {
		err = e.follows(c.state)
	}
	if err != nil && !errors.Is(err, ErrNewer) {
		err = fmt.Errorf("%w; %w", err, ErrDamaged)
	}
	if err != nil {
		return nil, fmt.Errorf("journal entry %d: %w", c.next, err)
	}
	c.apply(e, b)
	return e, nil
}

// damagedJournal adds to an error of reading the journal that it is damage.
func damagedJournal(err error) error {
	if errors.Is(err, bucket.ErrDamaged) {
		return fmt.Errorf("%w; %w", err, ErrDamaged)
	}
	return err
}

// AddPack says that the pack's object is durable in the bucket. A pack that was
// there before and has condemned chunks has been stored anew, or found good again,
// so they are condemned no longer.
func (c *Catalog) AddPack(ctx context.Context, id chunk.Digest, size int64) error {
	var otherSize error
	err := c.change(ctx, "add pack "+id.String(), func(s *state) Entry {
		p, ok := s.packs[id]
		if ok && p.size != size {
			otherSize = fmt.Errorf("add pack %s: it has %d bytes, the journal says %d: run quarry check", id, size, p.size)
			return nil
		}
		if ok && len(p.condemned) == 0 && !p.emptied {
			return nil
		}
		return Pack{ID: id, Size: size}
	})
	return errors.Join(err, otherSize)
}

// CorrectPack is AddPack for a pack whose size the journal has wrong. The caller
// has read the whole object, and its digest is id. A pack that is not in the
// catalog is not an error.
func (c *Catalog) CorrectPack(ctx context.Context, id chunk.Digest, size int64) error {
	return c.change(ctx, "correct pack "+id.String(), func(s *state) Entry {
		if p, ok := s.packs[id]; !ok || p.size == size {
			return nil
		}
		return Pack{ID: id, Size: size}
	})
}

// RetirePack takes a pack out of the store; its object may be deleted when this
// has returned nil. A pack that is not in the catalog is not an error.
func (c *Catalog) RetirePack(ctx context.Context, id chunk.Digest) error {
	return c.change(ctx, "retire pack "+id.String(), func(s *state) Entry {
		if _, ok := s.packs[id]; !ok {
			return nil
		}
		return PackRetired{ID: id}
	})
}

// Condemn says that a stored copy of a chunk must not be used. One in a pack
// that is not in the catalog is out of use already, and not an error.
func (c *Catalog) Condemn(ctx context.Context, condemned CondemnedChunk) error {
	return c.change(ctx, "condemn chunk "+condemned.Digest.String(), func(s *state) Entry {
		if _, ok := s.packs[condemned.Pack]; !ok || s.isCondemned(condemned) {
			return nil
		}
		return condemned
	})
}

// SetName binds a name. Its serial must be higher than every one used for the
// name, deleted or not: ErrStale. To set again what is set is not an error.
func (c *Catalog) SetName(ctx context.Context, n Name) error {
	what := fmt.Sprintf("set name %s:%s", n.Repo, n.Tag)
	if n.Statement != nil {
		statement, err := compact(n.Statement)
		if err != nil {
			return fmt.Errorf("%s: statement: %w", what, err)
		}
		n.Statement = json.RawMessage(statement)
	}
	if err := c.tick(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return c.change(ctx, what, func(s *state) Entry {
		if s.hasName(n) {
			return nil
		}
		return n
	})
}

// DeleteName removes a name, or returns ErrNotFound.
func (c *Catalog) DeleteName(ctx context.Context, repo, tag string) error {
	if err := c.tick(ctx); err != nil {
		return fmt.Errorf("delete name %s:%s: %w", repo, tag, err)
	}
	return c.change(ctx, fmt.Sprintf("delete name %s:%s", repo, tag), func(s *state) Entry {
		return NameDeleted{Repo: repo, Tag: tag, Serial: s.serial(repo, tag) + 1}
	})
}

// change appends the entry that makeEntry makes of the state, and applies it.
// With a nil entry there is nothing to do. makeEntry is asked again when the
// state has changed under it. An error means that the change was not made, or,
// when the journal could not be asked either, that it may have been.
func (c *Catalog) change(ctx context.Context, what string, makeEntry func(*state) Entry) error {
	c.appending.Lock()
	defer c.appending.Unlock()
	for done := false; !done; {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if c.fenced != nil {
			return fmt.Errorf("%s: %w", what, c.fenced)
		}
		var err error
		if done, err = c.changeOnce(ctx, makeEntry); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return nil
}

// changeOnce returns false when the state changed before the entry was appended.
func (c *Catalog) changeOnce(ctx context.Context, makeEntry func(*state) Entry) (done bool, err error) {
	e := makeEntry(c.state)
	switch {
	case e == nil && c.writer == nil:
		return true, nil
	case e == nil:
		// A writer that was fenced and does not know it yet must not confirm what the
		// next one may have undone.
		changed, err := c.confirmLocked(ctx)
		return !changed, err
	case !c.holds():
		return false, c.claimLocked(ctx)
	}
	return c.append(ctx, e)
}

// append makes e the next entry. It returns false when the next number turned
// out to hold an entry that this catalog wrote before and believed lost: that
// one is applied now, and e must be made anew.
//
// An error of the journal other than ErrTaken says nothing about whether the
// entry is there. The journal is asked; what it does not show may still arrive,
// so it is remembered as a doubt and recognised by its bytes. They suffice: an
// equal entry of another writer at the same number changes the state alike.
func (c *Catalog) append(ctx context.Context, e Entry) (done bool, err error) {
	b, err := EncodeEntry(e)
	if err != nil {
		return false, err
	}
	if err := e.follows(c.state); err != nil {
		return false, err
	}
	err = c.journal.Append(ctx, c.next, b)
	if err == nil {
		c.apply(e, b)
		return true, nil
	}
	if !errors.Is(err, bucket.ErrTaken) {
		c.doubts = append(c.doubts[max(0, len(c.doubts)-maxDoubts+1):], chunk.Sum(b))
	}
	landed, readErr := c.readNext(ctx)
	switch {
	case readErr != nil:
		return false, fmt.Errorf("%w; it is not known whether it was applied: %w", err, readErr)
	case landed == nil:
		return false, err
	}
	return bytes.Equal(landed, b), c.absorb(ctx, landed)
}

// absorb applies what has the next number although this catalog's append did not
// succeed: an own entry that was believed lost, or, before its epoch has begun, one
// of the writer before. Anything else fences it.
func (c *Catalog) absorb(ctx context.Context, landed []byte) error {
	own := slices.Contains(c.doubts, chunk.Sum(landed))
	if !own {
		e, err := DecodeEntry(landed)
		_, epoch := e.(Epoch)
		if c.holds() || err != nil || epoch {
			c.fenced = fmt.Errorf("journal entry %d was written by %s: %w", c.next, authorOf(e), ErrFenced)
			close(c.fencedCh)
			return c.fenced
		}
	}
	if _, err := c.take(landed); err != nil {
		return err
	}
	if own {
		c.log.InfoContext(ctx, "journal entry written although its append failed", "entry", c.next-1)
	}
	return nil
}

// authorOf says who wrote an entry, as far as it is known.
func authorOf(e Entry) string {
	if e, ok := e.(Epoch); ok {
		return fmt.Sprintf("the writer of epoch %d, pid %d on %s", e.N, e.PID, e.Host)
	}
	return "somebody else"
}

// readNext returns the bytes of the next entry, nil when there is none. It asks
// even when the caller of the append has gone, for the sake of all later ones.
func (c *Catalog) readNext(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveTimeout)
	defer cancel()
	next, stop := iter.Pull2(c.journal.Read(ctx, c.next))
	defer stop()
	raw, err, _ := next()
	return raw.Data, err
}

// apply makes e, which is journal entry next with the bytes b, part of the state.
func (c *Catalog) apply(e Entry, b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.entry = c.next
	e.apply(c.state)
	c.next++
	c.last = chunk.Sum(b)
	c.doubts = nil
}
