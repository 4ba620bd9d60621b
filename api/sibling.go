package api

import (
	"container/list"
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/trace"
)

const (
	// maxCandidates bounds the images whose lists are tried for one that never ran.
	// Each costs one decoded bootstrap when it is not known yet.
	maxCandidates = 8
	// minShare is the part of a list, 1/minShare, that must be in an image for the
	// list to be taken over: a base that images have in common is that much, and
	// what a program of another distribution touches is less.
	minShare = 2
	// maxMapped bounds the images whose taken-over list is kept, and maxPlaced the
	// lists kept in the form that other images understand: 1024 × 2 KiB, and 64 ×
	// 504 places of some 130 bytes, are 2 and 4 MiB; 32 and 68 MiB at worst.
	maxMapped = 1024
	maxPlaced = 64
	// mappedFor is how long a list that was taken over, or none, stands although
	// records have come since.
	mappedFor = 10 * time.Second
	// maxMapLoads bounds the bootstraps decoded at once for this, as each is in
	// memory whole with its tree.
	maxMapLoads = 2
	// mapTimeout ends a search that nobody may be waiting for any more.
	mapTimeout = time.Minute
)

// siblings finds lists for images that never ran in those of images that did.
type siblings struct {
	h      *shared
	flight singleflight.Group
	loads  chan struct{}

	mu     sync.Mutex // guards what follows
	mapped *recent[mapped]
	placed *recent[placed]
}

// mapped is the list that an image was given.
type mapped struct {
	list  []uint32
	added uint64 // traces.added, before the search
	at    time.Time
}

// placed is the list of an image that ran.
type placed struct {
	places  []trace.Place
	version uint64 // of the list
}

func newSiblings(h *shared) *siblings {
	return &siblings{h: h, loads: make(chan struct{}, maxMapLoads), mapped: newRecent[mapped](maxMapped), placed: newRecent[placed](maxPlaced)}
}

// list returns the list that the image with that id and statement gets from
// another one; near are the sources of its repository. It is empty when none fits.
func (s *siblings) list(ctx context.Context, id chunk.Digest, st image.Statement, near func() map[chunk.Digest]bool) ([]uint32, error) {
	added, now := s.h.traces.added(), s.h.cfg.Now()
	s.mu.Lock()
	m, ok := s.mapped.get(id)
	s.mu.Unlock()
	if ok && (m.added == added || now.Sub(m.at) < mappedFor) {
		return m.list, nil
	}
	done := s.flight.DoChan(id.Hex(), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mapTimeout)
		defer cancel()
		list, err := s.search(ctx, id, st, near())
		if err == nil {
			s.mu.Lock()
			s.mapped.put(id, mapped{list: list, added: added, at: now})
			s.mu.Unlock()
		}
		return list, err
	})
	select {
	case res := <-done:
		if res.Err != nil {
			return nil, res.Err
		}
		return res.Val.([]uint32), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// search takes the list of which most is in the image.
func (s *siblings) search(ctx context.Context, id chunk.Digest, st image.Statement, near map[chunk.Digest]bool) ([]uint32, error) {
	others, err := s.h.traces.others(ctx, id, near, maxCandidates)
	if err != nil || len(others) == 0 {
		return nil, err
	}
	var candidates [][]trace.Place
	for _, k := range others {
		places, err := s.places(ctx, k)
		if err != nil {
			s.h.log.WarnContext(ctx, "trace of an image cannot be used for others", "image_id", k.Image, "error", err)
			continue
		}
		candidates = append(candidates, places)
	}
	if len(candidates) == 0 {
		return nil, nil
	}
	im, leave, err := s.decode(ctx, st)
	if err != nil {
		return nil, err
	}
	defer leave()
	var best []uint32
	share := 1.0 / minShare
	for _, places := range candidates {
		list := trace.In(im, places)
		if got := float64(len(list)) / float64(max(1, len(places))); got > share || got == share && best == nil {
			best, share = list, got
		}
	}
	return best, nil
}

// places returns the list of an image in the form that other images understand.
func (s *siblings) places(ctx context.Context, k trace.Key) ([]trace.Place, error) {
	list, version, err := s.h.traces.list(ctx, k.Image)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	s.mu.Lock()
	p, ok := s.placed.get(k.Image)
	s.mu.Unlock()
	if ok && p.version == version {
		return p.places, nil
	}
	st, err := s.h.statementOf(ctx, k.Image, k.Source, k.Platform)
	if err != nil {
		return nil, err
	}
	im, leave, err := s.decode(ctx, st)
	if err != nil {
		return nil, err
	}
	defer leave()
	p = placed{places: trace.Places(im, list), version: version}
	s.mu.Lock()
	s.placed.put(k.Image, p)
	s.mu.Unlock()
	return p.places, nil
}

// decode reads the bootstrap of a statement, with its tree, of which a bounded
// number are in memory until their leave.
func (s *siblings) decode(ctx context.Context, st image.Statement) (im *rafs.Image, leave func(), err error) {
	select {
	case s.loads <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	leave = func() { <-s.loads }
	key := image.BootstrapKey(st.Bootstrap)
	boot, err := readVerified(ctx, s.h.cfg.Bucket, key, st.Bootstrap, rafs.MaxBootstrap)
	if err == nil {
		if im, err = rafs.Decode(boot); err != nil {
			err = fmt.Errorf("%w: %s: %w", ErrObjectCorrupt, key, err)
		}
	}
	if err != nil {
		leave()
		return nil, nil, err
	}
	return im, leave, nil
}

// recent keeps the values used last. Not safe for concurrent use.
type recent[V any] struct {
	limit int
	order *list.List // of entry[V], last used first
	at    map[chunk.Digest]*list.Element
}

type entry[V any] struct {
	key chunk.Digest
	v   V
}

func newRecent[V any](limit int) *recent[V] {
	return &recent[V]{limit: limit, order: list.New(), at: map[chunk.Digest]*list.Element{}}
}

func (r *recent[V]) get(key chunk.Digest) (v V, ok bool) {
	el, ok := r.at[key]
	if !ok {
		return v, false
	}
	r.order.MoveToFront(el)
	return el.Value.(entry[V]).v, true
}

func (r *recent[V]) put(key chunk.Digest, v V) {
	if el, ok := r.at[key]; ok {
		el.Value = entry[V]{key, v}
		r.order.MoveToFront(el)
		return
	}
	r.at[key] = r.order.PushFront(entry[V]{key, v})
	if r.order.Len() > r.limit {
		delete(r.at, r.order.Remove(r.order.Back()).(entry[V]).key)
	}
}
