package gc

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/trace"
)

// inventory is what the first mark found dead.
type inventory struct {
	images  []deadImage
	objects []bucket.Object // bootstraps, configs, mappings and traces
}

// deadImage is all that is stored below a source.
type deadImage struct {
	source     chunk.Digest
	statements []string // the statements first: without one the rest is nothing
	rest       []string
	size       map[string]int64
}

func (d *deadImage) keys() []string { return append(append([]string{}, d.statements...), d.rest...) }

// prefixes are where dead objects are looked for.
var prefixes = []string{"bootstraps/", "configs/", "blobs/", trace.Prefix}

// takeStock lists what is dead. Objects whose keys are none of ours are left alone.
func (r *run) takeStock(ctx context.Context) error {
	r.dead = &inventory{}
	for o, err := range r.cfg.Bucket.List(ctx, image.ImagesPrefix) {
		if err != nil {
			return fmt.Errorf("list %s: %w", image.ImagesPrefix, err)
		}
		hex, _, _ := strings.Cut(strings.TrimPrefix(o.Key, image.ImagesPrefix), "/")
		source, err := chunk.ParseHex(hex)
		if err != nil || r.marks.sources[source] {
			continue
		}
		n := len(r.dead.images)
		if n == 0 || r.dead.images[n-1].source != source { // keys come in order
			r.dead.images = append(r.dead.images, deadImage{source: source, size: map[string]int64{}})
			n++
		}
		im := &r.dead.images[n-1]
		im.size[o.Key] = o.Size
		if strings.HasSuffix(o.Key, "/statement") {
			im.statements = append(im.statements, o.Key)
		} else {
			im.rest = append(im.rest, o.Key)
		}
	}
	for _, prefix := range prefixes {
		for o, err := range r.cfg.Bucket.List(ctx, prefix) {
			if err != nil {
				return fmt.Errorf("list %s: %w", prefix, err)
			}
			if r.isDead(o.Key) {
				r.dead.objects = append(r.dead.objects, o)
			}
		}
	}
	return nil
}

// isDead says of an object below prefixes whether no image needs it.
func (r *run) isDead(key string) bool {
	if strings.HasPrefix(key, trace.Prefix) {
		k, ok := trace.ParseKey(key)
		return ok && !r.marks.images[k.Image]
	}
	return !r.marks.keys[key]
}

// condemnObjects puts them on the gate's list.
func (r *run) condemnObjects() {
	var keys []string
	for i := range r.dead.images {
		keys = append(keys, r.dead.images[i].keys()...)
	}
	for _, o := range r.dead.objects {
		keys = append(keys, o.Key)
	}
	r.cfg.Gate.condemn(keys)
}

// markNew marks the images whose statements came after the first look: nobody may have
// named them, but what they need is on the list of the dead.
func (r *run) markNew(ctx context.Context) error {
	known := map[string]bool{}
	for i := range r.dead.images {
		for _, key := range r.dead.images[i].statements {
			known[key] = true
		}
	}
	for o, err := range r.cfg.Bucket.List(ctx, image.ImagesPrefix) {
		if err != nil {
			return fmt.Errorf("list %s: %w", image.ImagesPrefix, err)
		}
		source, _, ok := image.ParseStatementKey(o.Key)
		if !ok || known[o.Key] || r.marks.sources[source] {
			continue
		}
		if err := r.markSource(ctx, r.marks, source); err != nil {
			return err
		}
	}
	return nil
}

// deleteImages deletes the statements of the sources that are dead still. One that a
// conversion has asked for is kept with all that it needs, so that a statement that is
// there is never without what it names.
func (r *run) deleteImages(ctx context.Context) error {
	for i := range r.dead.images {
		im := &r.dead.images[i]
		if r.marks.sources[im.source] {
			continue
		}
		keys := im.keys()
		if !r.cfg.Gate.take(keys...) {
			r.report.Spared++
			if err := r.markSource(ctx, r.marks, im.source); err != nil {
				return err
			}
			continue
		}
		err := r.cfg.Catalog.DeleteImage(ctx, im.source)
		for _, key := range keys {
			if err == nil {
				err = r.deleteObject(ctx, key)
			}
			if err == nil {
				r.report.deleted("images", im.size[key])
			}
		}
		r.cfg.Gate.done(keys...)
		if err != nil {
			return err
		}
	}
	return nil
}

// deleteObject deletes an object of the gate's list. Unlike packs these come back under
// the same key, so whether this process may still write is asked right before.
func (r *run) deleteObject(ctx context.Context, key string) error {
	if err := r.cfg.Catalog.Confirm(ctx); err != nil {
		return err
	}
	return r.cfg.Bucket.Delete(ctx, key)
}

// deleteObjects deletes what only dead images needed.
func (r *run) deleteObjects(ctx context.Context) error {
	for _, o := range r.dead.objects {
		if !r.isDead(o.Key) || !r.cfg.Gate.take(o.Key) {
			continue
		}
		err := r.deleteObject(ctx, o.Key)
		r.cfg.Gate.done(o.Key)
		if err != nil {
			return err
		}
		kind, _, _ := strings.Cut(o.Key, "/")
		r.report.deleted(kind, o.Size)
	}
	return nil
}

// deleteRecords deletes the layer records that name a chunk which is gone: they are of
// no use to a conversion.
func (r *run) deleteRecords(ctx context.Context) error {
	if r.cfg.LayerChunks == nil {
		return nil
	}
	for o, err := range r.cfg.Bucket.List(ctx, image.LayersPrefix) {
		if err != nil {
			return fmt.Errorf("list %s: %w", image.LayersPrefix, err)
		}
		raw, err := bucket.ReadObject(ctx, r.cfg.Bucket, o.Key, image.MaxLayerRecord)
		if bucket.IsDamage(err) {
			continue
		}
		if err != nil {
			return err
		}
		chunks, known := r.cfg.LayerChunks(raw)
		if !known {
			continue
		}
		whole, err := r.hasAll(ctx, chunks)
		if err != nil {
			return err
		}
		if whole {
			continue
		}
		if err := r.deleteObject(ctx, o.Key); err != nil {
			return err
		}
		r.report.deleted("layers", o.Size)
	}
	return nil
}

// recordBatch is how many chunks of a record are looked up at once.
const recordBatch = 1024

func (r *run) hasAll(ctx context.Context, chunks []chunk.Digest) (bool, error) {
	for len(chunks) > 0 {
		n := min(len(chunks), recordBatch)
		has, err := r.cfg.Store.Has(ctx, chunks[:n])
		if err != nil {
			return false, err
		}
		for _, ok := range has {
			if !ok {
				return false, nil
			}
		}
		chunks = chunks[n:]
	}
	return true, nil
}

// isFull says of an error that the disk is full, which deleting may end.
func isFull(err error) bool { return errors.Is(err, errNoSpace) }
