package gc

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	indexmem "quarry/chunkindex/mem"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
)

// hasObject reports whether exactly body is stored under key.
func hasObject(ctx context.Context, b bucket.Bucket, key string, body []byte) (bool, error) {
	got, err := bucket.ReadObject(ctx, b, key, 1<<20)
	if errors.Is(err, bucket.ErrNotFound) {
		return false, nil
	}
	return err == nil && bytes.Equal(got, body), err
}

func putObject(ctx context.Context, b bucket.Bucket, key string, body []byte) error {
	if ok, err := hasObject(ctx, b, key, body); ok || err != nil {
		return err
	}
	return b.Put(ctx, key, bytes.NewReader(body), int64(len(body)))
}

// job converts an image that was pushed. Its tag may have moved on by the time when it has
// ended, and then nothing names the image.
func (p *proc) job(ctx context.Context, a *actor, im int, tag string) error {
	p.w.jobs[a] = simSource(im)
	defer delete(p.w.jobs, a)
	return p.convert(ctx, im, tag)
}

// convert does what converter.Convert does, call by call; without a tag it names nothing.
func (p *proc) convert(ctx context.Context, im int, tag string) error {
	s := p.gate.Begin()
	defer s.End()
	b := s.Bucket(&simBucket{p, p.w.bucket}, p.catalog.Confirm)
	boot, source := simBoot(im), simSource(im)
	recipe, _ := simRecipe(boot)

	known, err := hasObject(ctx, b, image.LayerKey(source), boot)
	if err != nil {
		return err
	}
	if known {
		has, err := p.store.Has(ctx, recipe.Chunks)
		if err != nil {
			return err
		}
		for _, ok := range has {
			known = known && ok
		}
	}
	if !known {
		err := p.store.Write(ctx, func(ctx context.Context, w store.Putter) error {
			for _, d := range recipe.Chunks {
				if _, err := w.Put(ctx, simContent[d]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := putObject(ctx, b, image.LayerKey(source), boot); err != nil {
			return err
		}
	}
	for _, o := range simObjects[im] {
		if err := putObject(ctx, b, o.key, o.body); err != nil {
			return err
		}
	}
	if tag == "" {
		return nil
	}
	serial := p.catalog.Serial("r", tag) + 1
	err = p.catalog.SetName(ctx, catalog.Name{Repo: "r", Tag: tag, Source: source, Serial: serial})
	if err == nil {
		p.w.acked[tag] = max(p.w.acked[tag], serial)
	}
	return err
}

type simObject struct {
	key  string
	body []byte
}

// simObjects are the objects of each image, in the order of writing.
var simObjects = func() [][]simObject {
	var all [][]simObject
	for im := range simImages {
		boot, config := simBoot(im), fmt.Appendf(nil, "config %d", im%2)
		recipe, _ := simRecipe(boot)
		all = append(all, []simObject{
			{image.BootstrapKey(chunk.Sum(boot)), boot},
			{image.ConfigKey(chunk.Sum(config)), config},
			{image.BlobKey(*recipe.Blob), []byte(chunk.Sum(boot).String())},
			{image.StatementKey(simSource(im), image.HostPlatform()), simStatement(im)},
		})
	}
	return all
}()

func simStatementOf(im int) []byte { return simObjects[im][3].body }

// mount reads an image under a lease, whatever becomes of its name.
func (p *proc) mount(ctx context.Context, a *actor, tag string) error {
	n, ok := p.catalog.Name("r", tag)
	if !ok {
		return nil
	}
	im := 0
	for simSource(im) != n.Source {
		im++
	}
	boot := simBoot(im)
	p.w.leases[a] = Lease{Image: image.ID(simStatementOf(im)), Bootstrap: chunk.Sum(boot)}
	defer delete(p.w.leases, a)
	if again, ok := p.catalog.Name("r", tag); !ok || again.Source != n.Source || p.catalog.Confirm(ctx) != nil {
		delete(p.w.leases, a)
		return nil
	}
	recipe, _ := simRecipe(boot)
	for range 2 {
		for _, d := range recipe.Chunks {
			got, err := p.store.Get(ctx, d, nil)
			if err == nil && !bytes.Equal(got, simContent[d]) {
				err = errors.New("wrong bytes")
			}
			// A process that was overtaken has an old index, and is told so at its next
			// write: the packs it reads may be gone.
			if err != nil && !p.dead && p.catalog.Confirm(ctx) == nil {
				return fmt.Errorf("mounted image %d: %w", im, err)
			}
			if err := a.yield(false); err != nil {
				return nil
			}
		}
	}
	return nil
}

// pin pins what a name has, as the API does: it asks for the statement in a session.
func (p *proc) pin(ctx context.Context, im int) error {
	s := p.gate.Begin()
	defer s.End()
	b := s.Bucket(&simBucket{p, p.w.bucket}, p.catalog.Confirm)
	if ok, err := hasObject(ctx, b, image.StatementKey(simSource(im), image.HostPlatform()), simStatementOf(im)); !ok || err != nil {
		return err
	}
	return p.catalog.Pin(ctx, simSource(im))
}

// verify opens the bucket as it is now, with nothing else, and checks that every root
// is whole and that nothing acknowledged was forgotten.
func (w *world) verify(ctx context.Context) error {
	if !w.dirty {
		return nil
	}
	w.dirty = false
	cat := w.judge
	if _, err := cat.CatchUp(ctx, nil); err != nil {
		return err
	}
	s, err := packed.Open(ctx, packed.Config{Bucket: w.bucket, Catalog: cat, Index: indexmem.New(), TmpDir: w.tmp, Workers: 1})
	if err != nil {
		return err
	}
	for tag, serial := range w.acked {
		if got := cat.Serial("r", tag); got < serial {
			return fmt.Errorf("name %s has serial %d, %d was acknowledged", tag, got, serial)
		}
	}
	roots := map[chunk.Digest]string{}
	for _, n := range cat.Names() {
		roots[n.Source] = "name " + n.Tag
	}
	for _, source := range cat.Pins() {
		roots[source] = "pin"
	}
	for im := range simImages {
		if err := w.verifyStatement(ctx, im); err != nil {
			return err
		}
		if why, ok := roots[simSource(im)]; ok {
			for _, o := range simObjects[im] {
				if ok, err := hasObject(ctx, w.bucket, o.key, o.body); !ok || err != nil {
					return fmt.Errorf("%s needs image %d: object %s is missing or wrong: %v", why, im, o.key, err)
				}
			}
			if err := w.verifyChunks(ctx, s, simBoot(im), fmt.Sprintf("%s, image %d", why, im)); err != nil {
				return err
			}
		}
		boot := simBoot(im)
		for _, l := range w.leases {
			if l.Bootstrap == chunk.Sum(boot) {
				if err := w.verifyChunks(ctx, s, boot, fmt.Sprintf("lease of image %d", im)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// verifyStatement checks that a statement that is there is not without what it names,
// whether anybody names it or not: check calls that damage.
func (w *world) verifyStatement(ctx context.Context, im int) error {
	objects := simObjects[im]
	statement, rest := objects[len(objects)-1], objects[:len(objects)-1]
	if ok, err := hasObject(ctx, w.bucket, statement.key, statement.body); !ok || err != nil {
		return err
	}
	for _, o := range rest {
		if ok, err := hasObject(ctx, w.bucket, o.key, o.body); !ok || err != nil {
			return fmt.Errorf("image %d has a statement, and object %s is missing or wrong: %v", im, o.key, err)
		}
	}
	return nil
}

func (w *world) verifyChunks(ctx context.Context, s *packed.Store, boot []byte, why string) error {
	recipe, _ := simRecipe(boot)
	for _, d := range recipe.Chunks {
		got, err := s.Get(ctx, d, nil)
		if err == nil && !bytes.Equal(got, simContent[d]) {
			err = errors.New("wrong bytes")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", why, err)
		}
	}
	return nil
}
