package chunkindex

// Siblings returns of how many packs the digests are kept.
func (x *Index) Siblings() int {
	x.siblings.mu.RLock()
	defer x.siblings.mu.RUnlock()
	return len(x.siblings.packs)
}
