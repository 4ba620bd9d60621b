package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"quarry/api"
	"quarry/api/client"
	"quarry/converter"
	"quarry/converter/oci"
	"quarry/signer"
	"quarry/store/image"
)

type signOptions struct {
	target  target
	key     string
	source  string
	all     bool
	expires string
	wait    time.Duration
	limits  limits

	platformList []string
	platforms    []image.Platform // of platformList
}

func newSign() *cobra.Command {
	var o signOptions
	c := &cobra.Command{
		Use:   "sign IMAGE… --store URL --key FILE, or sign --all",
		Short: "sign images that a store has converted, after converting them here as well",
		Long: `sign is for the host of a signing key that is not the store's (quarry serve --no-sign). It
reads the layers of each image from the store, or from --source, converts them again and
signs when the result is the store's to the byte: nothing of what the store says is believed.
IMAGE is what was pushed, as quarry push prints it:

  REPO:TAG@sha256:…    the image, and that REPO:TAG is it
  REPO@sha256:…        the image alone
  REPO:TAG             as a key of --trust, or this one, has said before: to change keys

--all signs every name that a key of --trust, or this one, has signed. What this key has signed
already is left as it is. Of an image index every image is signed that the store has, and sign
fails when it has none for a platform that the index lists: it was not converted (quarry serve
--platforms), or the store hides it. --platforms says which are enough. The store takes signatures by the keys/*.pub of its data folder, from
a token of the scopes pull and push.

Exit codes: 0 all is signed; 1 something is not; 2 usage; 3 the store has another image than
its source gives.

` + limitHelp(),
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			return runSign(c.Context(), o, args, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.target.flags(c)
	f := c.Flags()
	f.StringVar(&o.key, "key", "", "private key to sign with, as quarry keygen makes it")
	f.StringVar(&o.source, "source", "", "where the image's layers are, in place of the store: SRC as in quarry convert")
	f.BoolVar(&o.all, "all", false, "sign every name that is signed by a key of --trust or this one")
	f.StringVar(&o.expires, "expires", "", "how long what is said of a tag is valid, such as 30d; default is for good")
	f.DurationVar(&o.wait, "wait", 2*time.Minute, "how long to wait for images that the store is still converting; 0 is not at all")
	f.StringSliceVar(&o.platformList, "platforms", nil, "of an image index, OS/ARCH[/VARIANT] that the store must have if the index lists them; default is all that it lists")
	f.Func("limit", limitUsage, o.limits.set)
	return c
}

// signing is one run of sign.
type signing struct {
	signOptions
	key    *signer.Key
	own    signer.Trust // in key
	trust  signer.Trust // of --trust
	life   time.Duration
	bounds converter.Limits
	store  *client.Client
	stdout io.Writer
	bar    *progress
}

func (o signOptions) check(args []string) (refs []image.Ref, err error) {
	switch {
	case o.key == "":
		return nil, usageError("sign needs --key FILE, a private key that quarry keygen has made")
	case o.all == (len(args) > 0):
		return nil, usageError("give images or --all")
	case o.source != "" && len(args) != 1:
		return nil, usageError("--source is of one IMAGE")
	}
	for _, arg := range args {
		ref, err := image.ParseRef(arg)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errUsage, err)
		}
		refs = append(refs, ref)
		if o.expires != "" && (ref.Tag == "" || ref.Digest == nil) {
			return nil, usageError("--expires is of a tag that somebody has looked at: give REPO:TAG@sha256:…")
		}
	}
	if o.all && o.expires != "" {
		return nil, usageError("--all keeps the times that were given: --expires goes with REPO:TAG@sha256:…")
	}
	if o.source != "" {
		if err := oci.CheckSource(o.source); err != nil {
			return nil, fmt.Errorf("%w: %w", errUsage, err)
		}
	}
	return refs, nil
}

func runSign(ctx context.Context, o signOptions, args []string, stdout, stderr io.Writer) error {
	refs, err := o.check(args)
	if err != nil {
		return err
	}
	s := &signing{signOptions: o, stdout: stdout, bar: newProgress(stderr)}
	if o.expires != "" {
		if s.life, err = parseAge(o.expires); err != nil {
			return fmt.Errorf("%w: --expires: %w", errUsage, err)
		}
	}
	for _, text := range o.platformList {
		p, err := platformFlag(text)
		if err != nil {
			return err
		}
		s.platforms = append(s.platforms, p)
	}
	if err := s.bounds.SetAll(o.limits); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if s.key, err = signer.LoadKey(o.key); err != nil {
		return err
	}
	s.own = signer.NewTrust(s.key.Public())
	if s.store, err = s.target.client(ctx); err != nil {
		return err
	}
	defer s.store.Close()
	defer s.bar.end()
	if s.target.trust != "" || s.target.data != "" {
		if s.trust, err = s.target.trusted(); err != nil && !errors.Is(err, signer.ErrNoKeys) {
			return err
		}
	}
	if o.all {
		return s.everything(ctx)
	}
	var errs []error
	for _, ref := range refs {
		errs = append(errs, s.image(ctx, ref))
	}
	return errors.Join(errs...)
}

// everything signs all names that a trusted key has signed.
func (s *signing) everything(ctx context.Context) error {
	names, err := s.store.Names(ctx)
	if err != nil {
		return err
	}
	end := time.Now().Add(s.wait)
	var errs []error
	for _, n := range names {
		s.wait = max(0, time.Until(end)) // together
		ref := image.Ref{Repo: n.Repo, Tag: n.Tag}
		err := s.image(ctx, ref)
		if errors.Is(err, errNobodySaid) {
			s.bar.step(api.Progress{Step: "left", Item: err.Error()})
			continue
		}
		errs = append(errs, err) // what is not ready is not signed, and may have been by the old key
	}
	return errors.Join(errs...)
}

// image signs what is not signed of one image.
func (s *signing) image(ctx context.Context, ref image.Ref) error {
	var there api.Signable
	err := whenReady(ctx, s.wait, func() (err error) {
		there, err = s.store.Signable(ctx, ref)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", ref, err)
	}
	req, ref, err := s.sign(ctx, ref, there)
	said := fmt.Sprintf("signed by %s", s.key.Public())
	switch {
	case err != nil:
	case req.Name != nil || len(req.Images) > 0:
		err = s.store.Sign(ctx, ref, req)
	default:
		said = fmt.Sprintf("is signed by %s already", s.key.Public())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", ref, err)
	}
	if _, err := fmt.Fprintf(s.stdout, "%s (%s) %s\n", ref, platformsOf(there), said); err != nil {
		return err
	}
	lacking, err := s.lacking(ctx, ref, there)
	if req.Name == nil && len(req.Images) == 0 && errors.Is(err, oci.ErrNoBlob) {
		return nil // it was compared when it was signed, and its source is here no longer
	}
	if err == nil && len(lacking) > 0 {
		err = fmt.Errorf("NOT signed for %s, which its index lists: the store shows no image for that; --platforms says which platforms are enough", strings.Join(lacking, ", "))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", ref, err)
	}
	return nil
}

// platformsOf names the images there: of an index, the store may not have converted, or
// not show, every one.
func platformsOf(there api.Signable) string {
	names := make([]string, len(there.Images))
	for i, im := range there.Images {
		names[i] = im.Platform
	}
	return strings.Join(names, ", ")
}

// errNobodySaid says that there is no word of a trusted key on what a tag is.
var errNobodySaid = errors.New("what this tag is has only the store's word")

// sign makes the signatures that are missing, and returns the reference with the digest
// that they are of.
func (s *signing) sign(ctx context.Context, ref image.Ref, there api.Signable) (req api.SignRequest, _ image.Ref, err error) {
	before, err := s.nameStatement(ref, there.Name) // what a trusted key has said of the tag
	if ref.Digest == nil {
		if before == nil {
			return req, ref, fmt.Errorf("%w, and that is %s: give %s@sha256:… as it was pushed, or --trust with the key that has signed it (%w)",
				errNobodySaid, there.Source, ref, err)
		}
		ref.Digest = &before.Source
	} else if before != nil && before.Source != *ref.Digest {
		before = nil
	}
	if there.Source != *ref.Digest {
		return req, ref, fmt.Errorf("%w: the store answers for source %s", errDamage, there.Source)
	}
	for _, im := range there.Images {
		sig, err := s.imageSignature(ctx, ref, im)
		if err != nil {
			return req, ref, err
		}
		if sig != nil {
			req.Images = append(req.Images, api.ImageSignature{Platform: im.Platform, Signature: sig})
		}
	}
	if len(there.Images) == 0 {
		return req, ref, fmt.Errorf("the store has no image of it")
	}
	req.Name, err = s.nameEnvelope(ref, there.Name, before)
	return req, ref, err
}

// nameStatement returns what a trusted key has said of a tag.
func (s *signing) nameStatement(ref image.Ref, there *api.SignableName) (*image.NameStatement, error) {
	if there == nil || there.Statement == nil {
		return nil, errors.New("it is not signed")
	}
	payload, err := s.opened(there.Statement, image.NameStatementType)
	if err != nil {
		return nil, err
	}
	n, err := image.DecodeNameStatement(payload)
	switch {
	case err != nil:
		return nil, err
	case n.Repo != ref.Repo || n.Tag != ref.Tag:
		return nil, fmt.Errorf("%w: the store gives the name statement of %s:%s", errDamage, n.Repo, n.Tag)
	case n.Expires != nil && !time.Now().Before(*n.Expires):
		return nil, fmt.Errorf("%w: on %s", image.ErrExpired, n.Expires.Format(time.RFC3339))
	}
	return &n, nil
}

// opened opens an envelope by this key or a trusted one.
func (s *signing) opened(env []byte, kind string) ([]byte, error) {
	payload, _, err := signer.Open(env, kind, s.own)
	if errors.Is(err, signer.ErrWrongKey) {
		payload, _, err = signer.Open(env, kind, s.trust)
	}
	return payload, err
}

// maxFirstSerial bounds the serial that is signed on the store's word alone. Workers
// refuse what is lower than they have seen, so one near image.MaxSerial would leave the
// tag no moves, whatever store answers for it then. No honest store comes near it.
const maxFirstSerial = 1 << 40

// nameEnvelope signs what a tag is, unless it is signed. The serial follows what was
// signed before: an old statement that a store shows again makes none that is newer
// than what workers have seen, and lives no longer. Without one it is the store's next.
func (s *signing) nameEnvelope(ref image.Ref, there *api.SignableName, before *image.NameStatement) (json.RawMessage, error) {
	switch {
	case ref.Tag == "":
		return nil, nil
	case there == nil:
		return nil, fmt.Errorf("%s:%s names nothing in the store", ref.Repo, ref.Tag)
	case there.Source != *ref.Digest:
		return nil, fmt.Errorf("%s:%s names %s in the store", ref.Repo, ref.Tag, there.Source)
	}
	n := image.NameStatement{Repo: ref.Repo, Tag: ref.Tag, Source: *ref.Digest, Issued: time.Now().UTC().Truncate(time.Second)}
	switch {
	case before == nil && there.Serial >= maxFirstSerial:
		return nil, fmt.Errorf("%w: the store says that %s:%s has serial %d, and no tag is moved so often; %d is the last that is signed on its word", errDamage, ref.Repo, ref.Tag, there.Serial, maxFirstSerial)
	case before == nil:
		n.Serial = there.Serial + 1
	default:
		n.Serial = before.Serial + 1
	}
	if before != nil && s.life == 0 {
		if _, _, err := signer.Open(there.Statement, image.NameStatementType, s.own); err == nil {
			return nil, nil
		}
		n.Expires = before.Expires
	}
	if s.life > 0 {
		end := n.Issued.Add(s.life)
		n.Expires = &end
	}
	payload, err := image.EncodeNameStatement(n)
	if err != nil {
		return nil, err
	}
	return signer.Envelope{
		PayloadType: image.NameStatementType, Payload: payload,
		Signatures: []signer.Signature{signer.Sign(s.key, image.NameStatementType, payload)},
	}.Encode()
}

// imageSignature signs an image statement that is what the source gives; nil when this
// key has signed it, which says nothing unless it is of that source.
func (s *signing) imageSignature(ctx context.Context, ref image.Ref, im api.SignableImage) (json.RawMessage, error) {
	st, err := image.DecodeStatement(im.Statement)
	if err != nil {
		return nil, fmt.Errorf("%w: what the store has: %w", errDamage, err)
	}
	if st.Source != *ref.Digest || st.Platform.String() != im.Platform {
		return nil, fmt.Errorf("%w: the store gives the statement of source %s for %s", errDamage, st.Source, st.Platform)
	}
	if im.Image != nil {
		if payload, _, err := signer.Open(im.Image, image.StatementType, s.own); err == nil && bytes.Equal(payload, im.Statement) {
			return nil, nil
		}
	}
	made, err := s.remake(ctx, ref, st)
	if err != nil {
		return nil, err
	}
	payload, err := image.EncodeStatement(made.Statement)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(payload, im.Statement) {
		return nil, s.differs(ctx, made, st)
	}
	return signer.Sign(s.key, image.StatementType, payload).Encode()
}
