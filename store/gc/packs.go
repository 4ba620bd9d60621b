package gc

import (
	"context"
	"fmt"
	"syscall"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/pack"
)

const errNoSpace = syscall.ENOSPC

// survey finds what is dead, and which packs are worth emptying.
func (r *run) survey(ctx context.Context) error {
	if err := r.takeStock(ctx); err != nil {
		return err
	}
	sv, err := r.cfg.Store.Survey(ctx, r.marks.chunks.has)
	if err != nil {
		return err
	}
	for _, o := range sv.Orphans {
		if id, err := chunk.ParseHex(o.Key[len(pack.KeyPrefix):]); err == nil {
			r.orphans = append(r.orphans, o)
			r.size[id] = o.Size
			r.see(id)
		}
	}
	unsound := 0
	for _, u := range sv.Uses {
		switch {
		case !u.Sound:
			unsound++
		case u.Condemned, float64(u.LiveBytes) < r.limits.Ratio*float64(u.ChunkBytes):
			r.victims = append(r.victims, u)
			r.size[u.Pack] = u.Size
		}
	}
	if unsound > 0 {
		// Another pack may have the only copy that is left of what is in those.
		r.problem("%d packs are missing, cut off or not in the index, so no pack is collected: run check", unsound)
		r.victims = nil
	}
	return nil
}

// see notes when this process first saw the object of a pack that is in no catalog.
func (r *run) see(id chunk.Digest) {
	if _, ok := r.seen[id]; !ok {
		r.seen[id] = r.cfg.Since()
	}
}

// foresee fills in the report of a dry run.
func (r *run) foresee() {
	for i := range r.dead.images {
		for _, size := range r.dead.images[i].size {
			r.report.deleted("images", size)
		}
	}
	for _, o := range r.dead.objects {
		r.report.deleted(kindOf(o), o.Size)
	}
	for _, u := range r.victims {
		r.report.Condemned.add(u.Size)
		r.report.deleted("packs", u.Size)
		r.report.Repacked.Objects += u.Live
		r.report.Repacked.Bytes += u.LiveBytes
	}
	for _, o := range r.orphans {
		r.report.deleted("packs", o.Size)
	}
}

func (r *run) ids() []chunk.Digest {
	ids := make([]chunk.Digest, len(r.victims))
	for i, u := range r.victims {
		ids[i] = u.Pack
	}
	return ids
}

// condemn ends that anybody new counts on what is dead. From here on nothing is decided
// by the first mark alone.
func (r *run) condemn(ctx context.Context) error {
	r.step(fmt.Sprintf("condemn %d images, %d packs", len(r.dead.images), len(r.victims)))
	r.condemnObjects()
	for _, u := range r.victims {
		r.report.Condemned.add(u.Size)
	}
	return r.cfg.Store.CondemnPacks(ctx, r.ids())
}

// copy copies the live chunks out of the condemned packs. Packs without any cost
// nothing, so that a full disk can be emptied: what cannot be copied stays.
func (r *run) copy(ctx context.Context) error {
	st, err := r.cfg.Store.Copy(ctx, r.ids(), r.marks.chunks.has, func(id chunk.Digest, err error) {
		r.problem("pack %s is damaged and stays: %v: run check", id, err)
	})
	r.report.Repacked.Objects += st.Chunks
	r.report.Repacked.Bytes += st.Bytes
	if isFull(err) {
		r.problem("%v; packs with chunks that are needed stay", err)
		return nil
	}
	return err
}

// deletePacks retires what is empty and deletes what was retired long enough ago.
func (r *run) deletePacks(ctx context.Context) error {
	if err := r.copy(ctx); err != nil {
		return err
	}
	r.cfg.Store.Drain(r.ids())
	retired, err := r.cfg.Store.Retire(ctx, r.ids(), r.marks.chunks.has)
	for _, id := range retired {
		r.report.Retired.add(r.size[id])
		r.orphans = append(r.orphans, bucket.Object{Key: pack.Key(id), Size: r.size[id]})
		r.seen[id] = r.cfg.Since() // also when it was retired, and stored anew, before
	}
	if err != nil {
		return err
	}
	forgetErr := r.cfg.Store.Forget(ctx)
	if forgetErr != nil && !isFull(forgetErr) {
		return forgetErr
	}
	if err := r.deleteOrphans(ctx); err != nil {
		return err
	}
	if forgetErr != nil { // there was no room for it before
		if err := r.cfg.Store.Forget(ctx); err != nil {
			return err
		}
	}
	if len(retired) > 0 {
		r.recordsDue = true
	}
	if !r.recordsDue {
		return nil
	}
	if err := r.deleteRecords(ctx); err != nil {
		return err
	}
	r.recordsDue = false
	return nil
}

// deleteOrphans deletes the objects that are no packs of the catalog. Those of the
// survey were there before the wait, so that nobody is between storing and journaling
// them; the journal decides about each all the same.
func (r *run) deleteOrphans(ctx context.Context) error {
	for _, o := range r.orphans {
		id, err := chunk.ParseHex(o.Key[len(pack.KeyPrefix):])
		if err != nil {
			return err
		}
		if r.cfg.Since()-r.seen[id] < r.limits.Grace {
			r.report.Waiting.add(o.Size)
			continue
		}
		deleted, err := r.cfg.Store.DeletePack(ctx, id)
		if err != nil {
			return err
		}
		delete(r.seen, id)
		if deleted {
			r.report.deleted("packs", o.Size)
		}
	}
	return nil
}

func kindOf(o bucket.Object) string {
	for i, c := range o.Key {
		if c == '/' {
			return o.Key[:i]
		}
	}
	return o.Key
}
