package catalog

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"strings"

	"quarry/store/chunk"
)

// Packs returns the packs in the order in which they were added.
func (c *Catalog) Packs() []Pack {
	c.mu.RLock()
	defer c.mu.RUnlock()
	packs := make([]Pack, 0, len(c.state.packs))
	for id, p := range c.state.packs {
		packs = append(packs, Pack{ID: id, Size: p.size})
	}
	slices.SortFunc(packs, func(x, y Pack) int {
		return cmp.Compare(c.state.packs[x.ID].order, c.state.packs[y.ID].order)
	})
	return packs
}

// Condemned returns the condemned chunks, sorted by pack, offset and digest.
func (c *Catalog) Condemned() []CondemnedChunk {
	c.mu.RLock()
	defer c.mu.RUnlock()
	condemned := []CondemnedChunk{}
	for _, p := range c.state.packs {
		condemned = slices.AppendSeq(condemned, maps.Keys(p.condemned))
	}
	slices.SortFunc(condemned, compareCondemned)
	return condemned
}

// CondemnedIn returns the condemned chunks of one pack, sorted by offset and digest.
func (c *Catalog) CondemnedIn(pack chunk.Digest) []CondemnedChunk {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(c.state.packs[pack].condemned), compareCondemned)
}

func compareCondemned(x, y CondemnedChunk) int {
	return cmp.Or(bytes.Compare(x.Pack[:], y.Pack[:]), cmp.Compare(x.Off, y.Off), bytes.Compare(x.Digest[:], y.Digest[:]))
}

// Lifted returns the packs of which chunks were condemned that are so no longer.
func (c *Catalog) Lifted() []chunk.Digest {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var ids []chunk.Digest
	for id, p := range c.state.packs {
		if p.lifted {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(x, y chunk.Digest) int { return bytes.Compare(x[:], y[:]) })
	return ids
}

// Epoch returns the last writer's entry; zero when no writer made one.
func (c *Catalog) Epoch() Epoch {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.epoch
}

// Applied returns the number of the last journal entry that is in the catalog.
func (c *Catalog) Applied() uint64 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.next - 1
}

// HasPack reports whether the pack is there, and not retired.
func (c *Catalog) HasPack(id chunk.Digest) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	_, ok := c.state.packs[id]
	return ok
}

// PackSize returns the size that a pack's object has, and false for a pack that
// is not there.
func (c *Catalog) PackSize(id chunk.Digest) (int64, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	p, ok := c.state.packs[id]
	return p.size, ok
}

// IsCondemned says whether that copy of the chunk must not be used.
func (c *Catalog) IsCondemned(d, pack chunk.Digest, off int64) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.isCondemned(CondemnedChunk{Digest: d, Pack: pack, Off: off})
}

// Name returns what repo:tag is bound to.
func (c *Catalog) Name(repo, tag string) (Name, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.name(repo, tag)
}

// NameEntry returns the number of the journal entry that has bound the name to what it
// is bound to; 0 when there is no such name.
func (c *Catalog) NameEntry(repo, tag string) uint64 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	n, ok := c.state.names[nameKey{repo, tag}]
	if !ok || n.deleted {
		return 0
	}
	return n.entry
}

// Serial returns the highest serial that was used for the name, deleted or not;
// 0 when none was. The next SetName needs a higher one.
func (c *Catalog) Serial(repo, tag string) uint64 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.serial(repo, tag)
}

// Names returns all names, sorted by repository and tag.
func (c *Catalog) Names() []Name {
	c.mu.RLock()
	defer c.mu.RUnlock()
	names := []Name{}
	for _, n := range c.state.names {
		if !n.deleted {
			names = append(names, n.name)
		}
	}
	slices.SortFunc(names, func(x, y Name) int {
		return cmp.Or(strings.Compare(x.Repo, y.Repo), strings.Compare(x.Tag, y.Tag))
	})
	return names
}

// Repos returns the repositories that have a name, sorted.
func (c *Catalog) Repos() []string {
	repos := []string{}
	for _, n := range c.Names() {
		repos = append(repos, n.Repo)
	}
	return slices.Compact(repos)
}

// Tags returns the tags of a repository, sorted.
func (c *Catalog) Tags(repo string) []string {
	tags := []string{}
	for _, n := range c.Names() {
		if n.Repo == repo {
			tags = append(tags, n.Tag)
		}
	}
	return tags
}
