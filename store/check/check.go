// Package check verifies everything a data folder holds: packs, index, layer
// records, bootstraps, configs, statements and names. It says what is damaged
// and which images that touches, because that is what an operator must know.
package check

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
	"quarry/store/registry"
)

// Config says what to check.
type Config struct {
	Store   *packed.Store
	Bucket  bucket.Bucket
	Catalog *catalog.Catalog
	Trust   signer.Trust // signatures must be of these keys
	Signed  bool         // an image or name without a signature is told, as a note
	MACKey  []byte       // of the layer records
	Quick   bool         // read no chunk content
	// Lost is told of each chunk that an image lacks, possibly more than once; may be nil.
	Lost func(chunk.Digest)
}

// Problem is one thing that is wrong.
type Problem struct {
	Kind    string // constant: that of packed.Problem, or "object", "statement", "layer-record", "failure-record", "trace-record", "job-record", "unconverted", "name", "blob", "chunk-missing", "unsigned", "unknown"
	Object  string // key in the bucket
	Offset  int64
	Digest  chunk.Digest // of the chunk or object, zero when there is none
	Message string       // what is wrong and what was done
	// Images are names, or source digests, of the images it touches. Of more
	// than MaxImages the last entry says how many are left out.
	Images []string
	// Note: it is a state, "unsigned" or "unknown", or a missing pack that no image
	// needs, and no damage.
	Note bool
}

// Summary counts what was looked at, and Problems without those that are notes.
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
	touched map[chunk.Digest]*users       // by damaged chunk
	names   []catalog.Name                // before the check, so that all of them have their images by now
	named   map[chunk.Digest]*users       // names by source digest
	sources map[chunk.Digest]bool         // those with an image statement, and pushed ones that wait for theirs
	blobs   map[chunk.Digest]chunk.Digest // virtual blob by good bootstrap; zero when it has none
	lacking bool                          // an image lacks something, or it is not known what it needs
}

// Run checks everything and tells report each problem, in an order that depends
// on what the folder holds alone. A problem is damage: what is missing, has the
// wrong bytes or a signature that is not right. An image without any, and a
// statement of another format version, are states and told as notes. A damaged
// layer, failure or trace record is removed: the first is only a memory of a layer,
// which is then read again, the others of a conversion and of a run. One of another
// version is left alone. The error is about the check itself, a bucket that cannot be read among
// it: that says nothing of what the bucket holds, and nothing is removed for it.
func Run(ctx context.Context, cfg Config, report func(Problem)) (Summary, error) {
	c := &checker{
		cfg: cfg, report: report, names: cfg.Catalog.Names(),
		touched: map[chunk.Digest]*users{}, named: map[chunk.Digest]*users{},
		sources: map[chunk.Digest]bool{}, blobs: map[chunk.Digest]chunk.Digest{},
	}
	for _, n := range c.names {
		if c.named[n.Source] == nil {
			c.named[n.Source] = &users{}
		}
		c.named[n.Source].add(nameUser(n))
	}
	for _, p := range cfg.Catalog.Packs() {
		c.sum.Packs++
		c.sum.Bytes += p.Size
	}
	if err := cfg.Store.Check(ctx, packed.CheckConfig{Quick: cfg.Quick}, c.packProblem); err != nil {
		return c.sum, err
	}
	for _, step := range []func(context.Context) error{c.images, c.layers, c.failures, c.jobs, c.traces, c.pushed} {
		if err := step(ctx); err != nil {
			return c.sum, err
		}
	}
	c.checkNames(ctx)
	for _, p := range c.content {
		if u := c.touched[p.Digest]; u != nil {
			p.Images = u.list()
		}
		if p.Kind == string(packed.PackMissing) && !c.lacking {
			p.Note = true
			p.Message += "; no image needs it"
		}
		c.tell(p)
	}
	return c.sum, nil
}

func (c *checker) tell(p Problem) {
	if !p.Note {
		c.sum.Problems++
	}
	c.report(p)
}

func (c *checker) packProblem(p packed.Problem) {
	q := Problem{
		Kind: string(p.Kind), Object: "packs/" + p.Pack.Hex(), Offset: p.Off, Digest: p.Chunk,
		Message: fmt.Sprintf("%v (action: %s)", p.Err, p.Action),
	}
	if !p.Chunk.IsZero() && c.touched[p.Chunk] == nil {
		c.touched[p.Chunk] = &users{}
	}
	c.content = append(c.content, q)
}

// damage marks what is wrong with bytes that could be read.
type damage struct{ error }

func (d damage) Unwrap() error { return d.error }

func damagef(format string, args ...any) error { return damage{fmt.Errorf(format, args...)} }

func isDamage(err error) bool {
	return errors.As(err, new(damage)) || bucket.IsDamage(err)
}

// unlisted reports what ended the listing of prefix, when it is something that
// is no object; another err is returned.
func (c *checker) unlisted(prefix string, err error) error {
	if !errors.Is(err, bucket.ErrDamaged) {
		return fmt.Errorf("list %s: %w", prefix, err)
	}
	c.tell(Problem{Kind: "object", Object: prefix, Message: fmt.Sprintf("%v; move it out of the folder and check again: what comes after it was not checked", err)})
	return nil
}

// damaged reports an object that err calls damaged; another err is returned.
func (c *checker) damaged(kind, key string, err error, u users) error {
	if !isDamage(err) {
		return fmt.Errorf("check %s: %w", key, err)
	}
	c.tell(Problem{Kind: kind, Object: key, Message: fmt.Sprintf("%v; convert the image again", err), Images: u.list()})
	return nil
}

// checkNames reports names that lead to no image, and name statements that do
// not say what the journal says.
func (c *checker) checkNames(ctx context.Context) {
	for _, n := range c.names {
		if !c.sources[n.Source] {
			c.sources[n.Source] = true // told for all its names
			c.unconverted(ctx, n.Source)
		}
		u := nameUser(n)
		if n.Statement == nil {
			c.unsigned(c.entryOf(n), "the name", u)
		} else if err := c.nameStatement(n); err != nil {
			c.tell(Problem{Kind: "name", Object: c.entryOf(n), Message: fmt.Sprintf("%v; convert the image again", err), Images: u.list()})
		}
	}
}

// entryOf returns the object with the journal entry of a name.
func (c *checker) entryOf(n catalog.Name) string {
	return fmt.Sprintf("log/%020d", c.cfg.Catalog.NameEntry(n.Repo, n.Tag))
}

// unconverted tells of a named source without an image: a state when its manifest
// is kept, since its image is made then when somebody asks for it.
func (c *checker) unconverted(ctx context.Context, source chunk.Digest) {
	p := Problem{
		Kind: "name", Object: image.ImagesPrefix + source.Hex(), Images: c.users(source).list(),
		Message: "the name's image has no statement; convert it again",
	}
	if _, err := c.cfg.Bucket.Stat(ctx, registry.ContentKey(digest.Digest(source.String()))); err == nil {
		p.Kind, p.Note = "unconverted", true
		p.Message = "it was pushed, and its conversion waits, failed, or has nothing to convert: quarry images show says which"
	}
	c.tell(p)
}

// unsigned tells of what has no signature, where it should have one.
func (c *checker) unsigned(object, what string, u users) {
	if c.cfg.Signed {
		c.tell(Problem{
			Kind: "unsigned", Object: object, Images: u.list(), Note: true,
			Message: what + " has no signature, and no command takes it: sign it or convert it again",
		})
	}
}

// nameStatement verifies the signed form of a name.
func (c *checker) nameStatement(n catalog.Name) error {
	payload, _, err := signer.Open(n.Statement, image.NameStatementType, c.cfg.Trust)
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
