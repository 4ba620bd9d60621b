package catalog

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"
	"unicode/utf8"
)

const (
	// MaxHost bounds the host's name in an epoch entry: a DNS name is not longer.
	MaxHost = 255
	// idSize is the size of a writer's and of a folder's id in bytes, 16 of random.
	idSize = 16
	// maxTries bounds how often a Claim finds that the writer before it was faster.
	// Each time it has one more entry of that writer, so it is behind by a moment.
	maxTries = 256
)

// Writer is who may append to the journal.
type Writer struct {
	ID     string // of the process, hex of 16 random bytes
	Folder string // of its data folder, the same form
	Host   string // for people
	PID    int    // for people
}

// Epoch says that a writer has begun. Whoever wrote before may append nothing any
// more: the number it would take next is this entry's.
type Epoch struct {
	N      uint64    `json:"epoch"`
	Writer string    `json:"writer"`
	Folder string    `json:"folder"`
	Host   string    `json:"host"`
	PID    int       `json:"pid"`
	Time   time.Time `json:"time"` // for people: nothing is decided by it
}

func (e Epoch) validate() error { return e.Validate() }

// Validate says whether an entry can have these fields.
func (e Epoch) Validate() error {
	switch {
	case e.N == 0:
		return fmt.Errorf("epoch 0: epochs start at 1")
	case !validID(e.Writer) || !validID(e.Folder):
		return fmt.Errorf("writer %.40q of folder %.40q: want %d lower-case hex digits each", e.Writer, e.Folder, 2*idSize)
	case e.Host == "" || len(e.Host) > MaxHost || !utf8.ValidString(e.Host):
		return fmt.Errorf("host %.32q: want 1 to %d bytes of UTF-8", e.Host, MaxHost)
	case e.PID <= 0:
		return fmt.Errorf("pid %d is not positive", e.PID)
	case e.Time.Location() != time.UTC || e.Time.Nanosecond() != 0 || e.Time.Year() < 1 || e.Time.Year() > 9999:
		return fmt.Errorf("time %s is not in UTC and whole seconds", e.Time)
	}
	return nil
}

func validID(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == idSize && hex.EncodeToString(b) == s
}

func (e Epoch) follows(s *state) error {
	if e.N != s.epoch.N+1 {
		return fmt.Errorf("epoch %d comes after epoch %d", e.N, s.epoch.N)
	}
	return nil
}

func (e Epoch) apply(s *state) { s.epoch = e }

// holds says whether this catalog may append other entries than its epoch.
func (c *Catalog) holds() bool { return c.writer == nil || c.state.epoch.Writer == c.writer.ID }

// Claim begins the epoch of Config.Writer, which fences the writer before. What that
// one appended until now is applied first. ErrFenced: another writer's epoch
// came first. Without a Claim the first change makes it.
func (c *Catalog) Claim(ctx context.Context) error {
	c.appending.Lock()
	defer c.appending.Unlock()
	if err := c.claimLocked(ctx); err != nil {
		return fmt.Errorf("claim the journal: %w", err)
	}
	return nil
}

func (c *Catalog) claimLocked(ctx context.Context) error {
	for tries := 0; !c.holds(); tries++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if tries == maxTries {
			return fmt.Errorf("another writer appends faster: %w", ErrFenced)
		}
		// All that the writer before has written, at once: one that is asked for entry by
		// entry would be as fast.
		if _, err := c.confirmLocked(ctx); err != nil {
			return err
		}
		w := c.writer
		e := Epoch{N: c.state.epoch.N + 1, Writer: w.ID, Folder: w.Folder, Host: w.Host, PID: w.PID, Time: c.now().UTC().Truncate(time.Second)}
		if _, err := c.append(ctx, e); err != nil {
			return err
		}
	}
	if c.writer != nil {
		c.log.InfoContext(ctx, "writer's epoch begun", "epoch", c.state.epoch.N, "entry", c.next-1)
	}
	return nil
}

// Confirm asks the journal whether this writer may still append: ErrFenced when
// another one has.
func (c *Catalog) Confirm(ctx context.Context) error {
	c.appending.Lock()
	defer c.appending.Unlock()
	_, err := c.confirmLocked(ctx)
	return err
}

// confirmLocked reports whether the state changed: by an own entry that was believed
// lost, or, before the epoch, by one of the writer before.
func (c *Catalog) confirmLocked(ctx context.Context) (changed bool, err error) {
	if c.fenced != nil {
		return false, c.fenced
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	for raw, err := range c.journal.Read(ctx, c.next) {
		if err != nil {
			return changed, damagedJournal(err)
		}
		if err := c.absorb(ctx, raw.Data); err != nil {
			return changed, err
		}
		changed = true
	}
	return changed, nil
}

// Fenced returns a channel that is closed once another writer was seen.
func (c *Catalog) Fenced() <-chan struct{} { return c.fencedCh }
