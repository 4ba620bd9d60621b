package tree

import "quarry/store/image"

// covers tells which symlinks of the lower tree the layer takes away. A marker
// in lib/ is meant for the directory that a lower symlink lib leads to, but not
// when the layer puts its own directory in lib's place: that one starts empty,
// and following the link would hide files the layer's author never saw there.
type covers struct {
	m       *Merger
	entries []image.Entry
	// taken is nil until asked for; most layers need none. A spot with the name
	// "" is all that is in its directory. The value tells whether what is below
	// the spot goes as well: not when the layer has a directory there.
	taken map[spot]bool
}

// any reports whether the layer takes one of the symlinks away.
func (c *covers) any(links []spot) (bool, error) {
	if len(links) == 0 {
		return false, nil
	}
	if c.taken == nil {
		if err := c.collect(); err != nil {
			return false, err
		}
	}
	for _, l := range links {
		if gone, err := c.takes(l); err != nil || gone {
			return gone, err
		}
	}
	return false, nil
}

// takes reports whether the layer has something in the link's place, or takes
// it away together with a directory that it is in.
func (c *covers) takes(link spot) (bool, error) {
	if _, own := c.taken[link]; own {
		return true, nil
	}
	for dir := link.dir; ; dir = dir.at.dir {
		if c.taken[spot{dir, ""}] || c.taken[dir.at] {
			return true, nil
		}
		if dir.at.dir == nil {
			return false, nil
		}
		if err := c.m.spendLinkStep(); err != nil {
			return false, err
		}
	}
}

// collect fills taken. Markers that lead through symlinks themselves do not
// count: each of two could take the other's away.
func (c *covers) collect() error {
	c.taken = map[spot]bool{}
	for i := range c.entries {
		e := &c.entries[i]
		name, k, err := cleanMarker(e)
		if err != nil || k == bookkeeping || name == "" {
			continue // an error is reported when it is the entry's turn
		}
		s, via, err := c.m.locate(name, k)
		if err != nil {
			return err
		}
		if s.dir != nil && (k == ordinary || len(via) == 0) {
			c.taken[s] = c.taken[s] || k != ordinary || e.Type != image.TypeDir
		}
	}
	return nil
}
