// Package names moves names: it makes the signed name statement of a tag and
// binds the tag in the catalog. A push moves a tag when its manifest is stored, a
// conversion when its image is ready, and both do it with this one function, so
// that a worker meets one kind of statement and one order of serials.
package names

import (
	"context"
	"errors"
	"time"

	"quarry/signer"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// attempts is how often a name statement is made anew because somebody else
// moved the same name at the same moment.
const attempts = 16

// Catalog is what moving a name needs of a catalog.
type Catalog interface {
	// Serial returns the highest serial ever used for the name, 0 for none.
	Serial(repo, tag string) uint64
	// SetName binds a name; catalog.ErrStale when its serial was used meanwhile.
	SetName(ctx context.Context, n catalog.Name) error
}

var _ Catalog = (*catalog.Catalog)(nil)

// Config says where names are kept and who signs them.
type Config struct {
	Catalog Catalog
	Key     *signer.Key      // nil: names stay unsigned
	Now     func() time.Time // nil: time.Now
}

// Set binds repo:tag to source, durably on nil, and with a serial above all that
// were used for that name. Errors: those of Catalog.SetName.
func (c Config) Set(ctx context.Context, repo, tag string, source chunk.Digest) error {
	var err error
	for range attempts {
		n := catalog.Name{Repo: repo, Tag: tag, Source: source, Serial: c.Catalog.Serial(repo, tag) + 1}
		if n.Statement, err = c.statement(n); err != nil {
			return err
		}
		if err = c.Catalog.SetName(ctx, n); !errors.Is(err, catalog.ErrStale) {
			return err
		}
	}
	return err
}

// statement returns the signed envelope, nil without a key.
func (c Config) statement(n catalog.Name) ([]byte, error) {
	if c.Key == nil {
		return nil, nil
	}
	now := time.Now
	if c.Now != nil {
		now = c.Now
	}
	payload, err := image.EncodeNameStatement(image.NameStatement{
		Repo: n.Repo, Tag: n.Tag, Source: n.Source, Serial: n.Serial,
		Issued: now().UTC().Truncate(time.Second),
	})
	if err != nil {
		return nil, err
	}
	return signer.Envelope{
		PayloadType: image.NameStatementType,
		Payload:     payload,
		Signatures:  []signer.Signature{signer.Sign(c.Key, image.NameStatementType, payload)},
	}.Encode()
}
