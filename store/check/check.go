// Package check verifies everything a data folder holds: packs, index, layer
// records, bootstraps, configs, statements and names. It says what is damaged
// and which images that touches, because that is what an operator must know.
package check

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
)

const (
	// maxLayerRecord bounds a layer record in memory.
	maxLayerRecord = 1 << 30
	maxConfig      = 8 << 20
	// hasBatch is the number of chunks looked up at once.
	hasBatch = 1024
)

// Config says what to check.
type Config struct {
	Store   *packed.Store
	Bucket  bucket.Bucket
	Catalog *catalog.Catalog
	Trust   signer.Trust // signatures must be of these keys
	MACKey  []byte       // of the layer records
	Quick   bool         // read no chunk content
}

// Problem is one thing that is wrong.
type Problem struct {
	Kind    string // constant: that of packed.Problem, or "object", "statement", "layer-record", "name", "chunk-missing"
	Object  string // key in the bucket
	Offset  int64
	Digest  chunk.Digest // of the chunk or object, zero when there is none
	Message string       // what is wrong and what was done
	Images  []string     // names, or source digests, of the images it touches
}

// Summary counts what was looked at.
type Summary struct {
	Packs, Chunks, Bytes, Images, Problems int64
}

// checker collects problems of content first, because which images they touch
// is known only when all images have been read.
type checker struct {
	cfg     Config
	report  func(Problem)
	sum     Summary
	content []Problem
	touched map[chunk.Digest][]string // damaged chunk or pack → images
	names   map[chunk.Digest][]string // source digest → names
}

// Run checks everything and tells report each problem. A damaged layer record is
// removed: it is only a memory of a layer, which is then read again. The error
// is about the check itself.
func Run(ctx context.Context, cfg Config, report func(Problem)) (Summary, error) {
	c := &checker{cfg: cfg, report: report, touched: map[chunk.Digest][]string{}, names: map[chunk.Digest][]string{}}
	for _, n := range cfg.Catalog.Names() {
		c.names[n.Source] = append(c.names[n.Source], n.Repo+":"+n.Tag)
	}
	for _, p := range cfg.Catalog.Packs() {
		c.sum.Packs++
		c.sum.Bytes += p.Size
	}
	if err := cfg.Store.Check(ctx, packed.CheckConfig{Quick: cfg.Quick}, c.packProblem); err != nil {
		return c.sum, err
	}
	for _, step := range []func(context.Context) error{c.images, c.layers, c.checkNames} {
		if err := step(ctx); err != nil {
			return c.sum, err
		}
	}
	for _, p := range c.content {
		p.Images = c.touched[p.Digest]
		c.tell(p)
	}
	return c.sum, nil
}

func (c *checker) tell(p Problem) {
	c.sum.Problems++
	c.report(p)
}

func (c *checker) packProblem(p packed.Problem) {
	q := Problem{
		Kind: string(p.Kind), Object: "packs/" + p.Pack.Hex(), Offset: p.Off, Digest: p.Chunk,
		Message: fmt.Sprintf("%v (action: %s)", p.Err, p.Action),
	}
	if !p.Chunk.IsZero() {
		c.touched[p.Chunk] = nil
	}
	c.content = append(c.content, q)
}

// images checks every image statement and what it names.
func (c *checker) images(ctx context.Context) error {
	for obj, err := range c.cfg.Bucket.List(ctx, image.ImagesPrefix) {
		if err != nil {
			return fmt.Errorf("list images: %w", err)
		}
		if !strings.HasSuffix(obj.Key, "/statement") {
			continue
		}
		c.sum.Images++
		if err := c.image(ctx, obj.Key); err != nil {
			return err
		}
	}
	return nil
}

// image checks one image; the error is only that of a context that ended.
func (c *checker) image(ctx context.Context, key string) error {
	payload, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, image.MaxStatement)
	if err != nil {
		return c.object(ctx, "statement", key, err, nil)
	}
	s, err := image.DecodeStatement(payload)
	if err == nil && image.StatementKey(s.Source, s.Platform) != key {
		err = fmt.Errorf("the statement is about %s for %s", s.Source, s.Platform)
	}
	if err != nil {
		return c.object(ctx, "statement", key, err, c.names[sourceOfKey(key)])
	}
	users := c.users(s.Source)
	if err := c.signature(ctx, s, payload); err != nil {
		if err := c.object(ctx, "statement", key, err, users); err != nil {
			return err
		}
	}
	if _, err := c.verified(ctx, image.ConfigKey(s.Config), s.Config, maxConfig); err != nil {
		if err := c.object(ctx, "object", image.ConfigKey(s.Config), err, users); err != nil {
			return err
		}
	}
	return c.bootstrap(ctx, s, users)
}

// users names an image: by its names, or by its source digest when it has none.
func (c *checker) users(source chunk.Digest) []string {
	if names := c.names[source]; len(names) > 0 {
		return names
	}
	return []string{source.String()}
}

func sourceOfKey(key string) chunk.Digest {
	hex, _, _ := strings.Cut(strings.TrimPrefix(key, image.ImagesPrefix), "/")
	d, _ := chunk.ParseHex(hex) // zero, which names nothing, when it is none
	return d
}

// object reports a damaged object, unless the check itself was cancelled.
func (c *checker) object(ctx context.Context, kind, key string, err error, users []string) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, bucket.ErrNotFound) {
		err = errors.New("object is missing")
	}
	c.tell(Problem{Kind: kind, Object: key, Message: fmt.Sprintf("%v; convert the image again", err), Images: users})
	return nil
}

// signature fails when no trusted key has signed the statement. A statement
// with no signature at all is an image that waits for one, and no damage.
func (c *checker) signature(ctx context.Context, s image.Statement, payload []byte) error {
	var sigs []signer.Signature
	for obj, err := range c.cfg.Bucket.List(ctx, image.SigPrefix(s.Source, s.Platform)) {
		if err != nil {
			return err
		}
		raw, err := bucket.ReadObject(ctx, c.cfg.Bucket, obj.Key, signer.MaxSignature)
		if err != nil {
			return err
		}
		sig, err := signer.DecodeSignature(raw)
		if err != nil {
			return fmt.Errorf("%s: %w", obj.Key, err)
		}
		sigs = append(sigs, sig)
	}
	if len(sigs) == 0 {
		return nil
	}
	env, err := signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: sigs}.Encode()
	if err != nil {
		return err
	}
	_, _, err = signer.Open(env, image.StatementType, c.cfg.Trust)
	return err
}

func (c *checker) verified(ctx context.Context, key string, want chunk.Digest, limit int64) ([]byte, error) {
	p, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, limit)
	if err != nil {
		return nil, err
	}
	if got := chunk.Sum(p); got != want {
		return nil, fmt.Errorf("content has digest %s", got)
	}
	return p, nil
}

// bootstrap checks the metadata, and that the store holds every chunk of it.
func (c *checker) bootstrap(ctx context.Context, s image.Statement, users []string) error {
	key := image.BootstrapKey(s.Bootstrap)
	boot, err := c.verified(ctx, key, s.Bootstrap, rafs.MaxBootstrap)
	if err != nil {
		return c.object(ctx, "object", key, err, users)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		return c.object(ctx, "object", key, err, users)
	}
	if im.Blob == nil {
		return nil
	}
	if err := c.blobKey(ctx, im.Blob.ID, users); err != nil {
		return err
	}
	var missing []chunk.Digest
	for batch := range slices.Chunk(im.Blob.Chunks, hasBatch) {
		if missing, err = c.chunks(ctx, batch, users, missing); err != nil {
			return err
		}
	}
	if len(missing) > 0 {
		c.tell(Problem{
			Kind: "chunk-missing", Object: key, Digest: missing[0], Images: users,
			Message: fmt.Sprintf("no pack holds %d of its chunks; convert the image again", len(missing)),
		})
	}
	return nil
}

// blobKey checks the object that leads from a virtual blob to a bootstrap.
func (c *checker) blobKey(ctx context.Context, id chunk.Digest, users []string) error {
	key := image.BlobKey(id)
	const textSize = 71 // sha256: and 64 digits
	raw, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, textSize)
	if err == nil {
		_, err = chunk.Parse(string(raw))
	}
	if err != nil {
		return c.object(ctx, "object", key, err, users)
	}
	return nil
}

// chunks adds to missing what no pack holds, and notes the image for the chunks
// that were found damaged.
func (c *checker) chunks(ctx context.Context, batch []rafs.Chunk, users []string, missing []chunk.Digest) ([]chunk.Digest, error) {
	ds := make([]chunk.Digest, len(batch))
	for i, ch := range batch {
		ds[i] = ch.Digest
	}
	have, err := c.cfg.Store.Has(ctx, ds)
	if err != nil {
		return nil, err
	}
	c.sum.Chunks += int64(len(ds))
	for i, d := range ds {
		if known, damaged := c.touched[d]; damaged {
			c.touched[d] = mergeNames(known, users)
		} else if !have[i] {
			missing = append(missing, d)
		}
	}
	return missing, nil
}

func mergeNames(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

// layers checks the layer records.
func (c *checker) layers(ctx context.Context) error {
	prefix := strings.TrimSuffix(image.LayerKey(chunk.Digest{}), chunk.Digest{}.Hex())
	for obj, err := range c.cfg.Bucket.List(ctx, prefix) {
		if err != nil {
			return fmt.Errorf("list layer records: %w", err)
		}
		raw, err := bucket.ReadObject(ctx, c.cfg.Bucket, obj.Key, maxLayerRecord)
		if err == nil {
			_, err = image.DecodeLayer(raw, c.cfg.MACKey)
		}
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if del := c.cfg.Bucket.Delete(ctx, obj.Key); del != nil {
			return del
		}
		c.tell(Problem{Kind: "layer-record", Object: obj.Key, Message: fmt.Sprintf("%v; removed, so the layer is read anew", err)})
	}
	return nil
}

// checkNames reports names that lead to no image, and name statements that do
// not say what the journal says.
func (c *checker) checkNames(ctx context.Context) error {
	for source, names := range c.names {
		found := false
		for obj, err := range c.cfg.Bucket.List(ctx, image.ImagesPrefix+source.Hex()+"/") {
			if err != nil {
				return err
			}
			found = found || strings.HasSuffix(obj.Key, "/statement")
		}
		if !found {
			c.tell(Problem{Kind: "name", Object: image.ImagesPrefix + source.Hex(), Message: "the name's image has no statement; convert it again", Images: names})
		}
	}
	for _, n := range c.cfg.Catalog.Names() {
		if err := nameStatement(n, c.cfg.Trust); err != nil {
			c.tell(Problem{Kind: "name", Object: "log/", Message: fmt.Sprintf("%v; convert the image again", err), Images: []string{n.Repo + ":" + n.Tag}})
		}
	}
	return nil
}

// nameStatement verifies the signed form of a name; without one the name waits
// for a signature.
func nameStatement(n catalog.Name, trust signer.Trust) error {
	if n.Statement == nil {
		return nil
	}
	payload, _, err := signer.Open(n.Statement, image.NameStatementType, trust)
	if err != nil {
		return err
	}
	s, err := image.DecodeNameStatement(payload)
	if err != nil {
		return err
	}
	if s.Repo != n.Repo || s.Tag != n.Tag || s.Source != n.Source || s.Serial != n.Serial {
		return fmt.Errorf("name statement is about %s:%s, source %s, serial %d", s.Repo, s.Tag, s.Source, s.Serial)
	}
	return nil
}
