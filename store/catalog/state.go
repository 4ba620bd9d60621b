package catalog

import (
	"bytes"
	"fmt"

	"quarry/store/chunk"
)

// state is what the journal's entries add up to.
type state struct {
	packs     map[chunk.Digest]packState
	packCount uint64 // of all packs added so far
	names     map[nameKey]nameState
	entry     uint64 // of the journal that is applied
	epoch     Epoch  // the last one; zero before the first

	clock   int64                     // of the last Clock; 0 before the first
	left    map[chunk.Digest]int64    // clock when a source lost a name or its pin
	pins    map[chunk.Digest]struct{} // sources
	deleted map[chunk.Digest]struct{} // packs, for good
}

type packState struct {
	size      int64
	order     uint64 // packCount when it was first added, from 1
	condemned map[CondemnedChunk]struct{}
	lifted    bool // it had condemned chunks once that are so no longer
	emptied   bool // condemned as a whole, by gc
}

type nameKey struct{ repo, tag string }

// nameState stays when a name is deleted, for the serial.
type nameState struct {
	name    Name // with the highest serial ever used
	deleted bool
	since   int64  // clock when it was bound
	entry   uint64 // of the journal that bound it
}

func newState() *state {
	return &state{
		packs: map[chunk.Digest]packState{}, names: map[nameKey]nameState{},
		left: map[chunk.Digest]int64{}, pins: map[chunk.Digest]struct{}{}, deleted: map[chunk.Digest]struct{}{},
	}
}

// follows takes another size of a known pack: it corrects the earlier one.
func (e Pack) follows(s *state) error {
	if _, gone := s.deleted[e.ID]; gone {
		return fmt.Errorf("pack %s: %w", e.ID, ErrPackDeleted)
	}
	return nil
}

// apply leaves a known pack in its place: the chunk index prefers later packs, and
// what it was given for this one does not come again.
func (e Pack) apply(s *state) {
	before := s.packs[e.ID]
	order := before.order
	if order == 0 {
		s.packCount++
		order = s.packCount
	}
	lifted := before.lifted || len(before.condemned) > 0
	s.packs[e.ID] = packState{size: e.Size, order: order, condemned: map[CondemnedChunk]struct{}{}, lifted: lifted}
}

func (e PackRetired) follows(s *state) error {
	if _, ok := s.packs[e.ID]; !ok {
		return fmt.Errorf("pack %s is not in the catalog", e.ID)
	}
	return nil
}

func (e PackRetired) apply(s *state) { delete(s.packs, e.ID) }

func (e CondemnedChunk) follows(s *state) error {
	p, ok := s.packs[e.Pack]
	if !ok {
		return fmt.Errorf("pack %s of a condemned chunk is not in the catalog", e.Pack)
	}
	if e.Off >= p.size {
		return fmt.Errorf("pack %s has %d bytes, no chunk is at %d", e.Pack, p.size, e.Off)
	}
	return nil
}

func (e CondemnedChunk) apply(s *state) { s.packs[e.Pack].condemned[e] = struct{}{} }

func (e Name) follows(s *state) error { return s.checkSerial(e.Repo, e.Tag, e.Serial) }

func (e Name) apply(s *state) {
	if before, ok := s.name(e.Repo, e.Tag); ok && before.Source != e.Source {
		s.left[before.Source] = s.clock
	}
	s.names[nameKey{e.Repo, e.Tag}] = nameState{name: e, since: s.clock, entry: s.entry}
}

func (e NameDeleted) follows(s *state) error {
	if _, ok := s.name(e.Repo, e.Tag); !ok {
		return fmt.Errorf("%s:%s: %w", e.Repo, e.Tag, ErrNotFound)
	}
	return s.checkSerial(e.Repo, e.Tag, e.Serial)
}

func (e NameDeleted) apply(s *state) {
	if before, ok := s.name(e.Repo, e.Tag); ok {
		s.left[before.Source] = s.clock
	}
	n := Name{Repo: e.Repo, Tag: e.Tag, Serial: e.Serial}
	s.names[nameKey{e.Repo, e.Tag}] = nameState{name: n, deleted: true}
}

func (s *state) checkSerial(repo, tag string, serial uint64) error {
	if used := s.serial(repo, tag); serial <= used {
		return fmt.Errorf("%s:%s: serial %d: %w, serial %d was used before", repo, tag, serial, ErrStale, used)
	}
	return nil
}

func (s *state) serial(repo, tag string) uint64 {
	return s.names[nameKey{repo, tag}].name.Serial
}

func (s *state) name(repo, tag string) (Name, bool) {
	n, ok := s.names[nameKey{repo, tag}]
	if !ok || n.deleted {
		return Name{}, false
	}
	return n.name, true
}

func (s *state) isCondemned(c CondemnedChunk) bool {
	_, ok := s.packs[c.Pack].condemned[c]
	return ok
}

// hasName says whether the name stands just like this.
func (s *state) hasName(n Name) bool {
	got, ok := s.name(n.Repo, n.Tag)
	return ok && got.Source == n.Source && got.Serial == n.Serial && bytes.Equal(got.Statement, n.Statement)
}
