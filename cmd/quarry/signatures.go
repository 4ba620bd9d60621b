package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"

	"quarry/api"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// accepted returns the keys whose signatures this node takes: each *.pub in keys/,
// read anew, so that a key counts or counts no longer without a restart.
func (o *owner) accepted() (signer.Trust, error) {
	trust, err := signer.LoadTrust(o.dir.keys())
	if errors.Is(err, signer.ErrNoKeys) {
		return signer.Trust{}, nil
	}
	return trust, err
}

// maxNamesLooked bounds the names that warnOfAnotherKey opens: of a store whose key is
// here the first one says so.
const maxNamesLooked = 256

// warnOfAnotherKey says so when the names of the bucket are signed and none of them by a key
// of this folder, which is what a data folder is like that was made anew, without its keys,
// over the bucket of another.
func (o *owner) warnOfAnotherKey(ctx context.Context) error {
	if o.signing == nil {
		return nil
	}
	trust, err := o.accepted()
	if err != nil {
		return err
	}
	strange := 0
	for _, n := range o.catalog.Names() {
		if n.Statement == nil || strange == maxNamesLooked {
			continue
		}
		if _, _, err := signer.Open(n.Statement, image.NameStatementType, trust); err == nil {
			return nil
		}
		strange++
	}
	if strange == 0 {
		return nil
	}
	o.log.WarnContext(ctx, "NO NAME IN THIS BUCKET IS SIGNED BY A KEY OF THIS FOLDER: the signing key here is another than the one that the store had, and workers that trust that one take nothing that this one signs. "+
		"Stop this node and put the signing.key and signing.pub of the backup back into the keys folder. If the key is lost: give the new signing.pub to the workers (--trust), "+
		"and have every name signed again, by quarry sign --all --key signing.key --trust OLD.pub where the old public key is still there, or else by pushing or converting the images again",
		"keys", o.dir.keys(), "key", o.signing.Public().ID(), "names", strange)
	return nil
}

// sign takes signatures that were made on another host. A worker would find out about
// each that is wrong; they are held against the statements here, so that nobody can
// fill the place of the right ones.
func (o *owner) sign(ctx context.Context, ref image.Ref, req api.SignRequest) error {
	trust, err := o.accepted()
	if err != nil {
		return err
	}
	s, b := o.session() // a collection under way keeps what is signed
	defer s.End()
	for _, im := range req.Images {
		if err := addSignature(ctx, b, *ref.Digest, im, trust); err != nil {
			return err
		}
		o.log.InfoContext(ctx, "signature taken", "source", *ref.Digest, "platform", im.Platform)
	}
	if len(req.Name) == 0 || bytes.Equal(req.Name, []byte("null")) {
		return nil
	}
	if err := o.signName(ctx, ref, req.Name, trust); err != nil {
		return err
	}
	o.log.InfoContext(ctx, "signed name taken", "name", ref.String())
	return nil
}

// addSignature stores one signature of an image statement.
func addSignature(ctx context.Context, b bucket.Bucket, source chunk.Digest, im api.ImageSignature, trust signer.Trust) error {
	p, err := image.ParsePlatform(im.Platform)
	if err != nil {
		return fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	sig, err := signer.DecodeSignature(im.Signature)
	if err != nil {
		return fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	key := image.StatementKey(source, p)
	payload, err := bucket.ReadObject(ctx, b, key, image.MaxStatement)
	if errors.Is(err, bucket.ErrNotFound) {
		return fmt.Errorf("%w: source %s has no image for %s", api.ErrImageUnknown, source, p)
	}
	if err != nil {
		return err
	}
	env, err := signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: []signer.Signature{sig}}.Encode()
	if err != nil {
		return err
	}
	if _, err := openSigned(env, image.StatementType, trust); err != nil {
		return fmt.Errorf("image of %s for %s: %w", source, p, err)
	}
	if err := dropRevoked(ctx, b, source, p, trust); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx) // what is put is looked at again, though the client may have gone
	sigKey := image.SigKey(source, p, sig.KeyID)
	if err := b.Put(ctx, sigKey, bytes.NewReader(im.Signature), int64(len(im.Signature))); err != nil {
		return err
	}
	// A conversion that has replaced the statement meanwhile has deleted the signatures
	// of the old one, and again after it: so whoever comes later sees that it did.
	again, err := bucket.ReadObject(ctx, b, key, image.MaxStatement)
	if err == nil && bytes.Equal(again, payload) {
		return nil
	}
	if err == nil || errors.Is(err, bucket.ErrNotFound) {
		err = fmt.Errorf("%w: the image of %s for %s was converted anew", api.ErrMoved, source, p)
	}
	return errors.Join(err, b.Delete(ctx, sigKey))
}

// openSigned opens an envelope that is to be stored. The error of one that does not
// open is the sender's to mend.
func openSigned(env []byte, kind string, trust signer.Trust) ([]byte, error) {
	payload, _, err := signer.Open(env, kind, trust)
	if errors.Is(err, signer.ErrWrongKey) {
		err = fmt.Errorf("%w, which are the keys/*.pub of the store's data folder", err)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", api.ErrBadSignature, err)
	}
	return payload, nil
}

// dropRevoked deletes the signatures by keys that are accepted no longer: an envelope
// has room for signer.MaxSignatures, and the new one must be among them.
func dropRevoked(ctx context.Context, b bucket.Bucket, source chunk.Digest, p image.Platform, trust signer.Trust) error {
	ids := trust.KeyIDs()
	for obj, err := range b.List(ctx, image.SigPrefix(source, p)) {
		if err != nil {
			return err
		}
		if slices.Contains(ids, path.Base(obj.Key)) {
			continue
		}
		if err := b.Delete(ctx, obj.Key); err != nil {
			return err
		}
	}
	return nil
}

// signName binds a name anew to what it names already, with the statement of somebody
// who has looked at that.
func (o *owner) signName(ctx context.Context, ref image.Ref, env []byte, trust signer.Trust) error {
	payload, err := openSigned(env, image.NameStatementType, trust)
	if err != nil {
		return fmt.Errorf("name %s: %w", ref, err)
	}
	n, err := image.DecodeNameStatement(payload)
	if err != nil {
		return fmt.Errorf("name %s: %w: %w", ref, api.ErrBadSignature, err)
	}
	if n.Repo != ref.Repo || n.Tag != ref.Tag || n.Source != *ref.Digest {
		return fmt.Errorf("%w: the statement says that %s:%s is %s, it was sent for %s", api.ErrBadSignature, n.Repo, n.Tag, n.Source, ref)
	}
	now, ok := o.catalog.Name(ref.Repo, ref.Tag)
	switch {
	case !ok:
		return fmt.Errorf("%w: %s:%s names nothing", api.ErrMoved, ref.Repo, ref.Tag)
	case now.Source != n.Source:
		return fmt.Errorf("%w: %s:%s names %s by now", api.ErrMoved, ref.Repo, ref.Tag, now.Source)
	case n.Serial > now.Serial+1:
		return fmt.Errorf("%w: serial %d, the next one is %d", api.ErrBadSignature, n.Serial, now.Serial+1)
	}
	return o.catalog.SetName(ctx, catalog.Name{Repo: n.Repo, Tag: n.Tag, Source: n.Source, Serial: n.Serial, Statement: env})
}
