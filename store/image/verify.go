package image

import (
	"errors"
	"fmt"
	"time"

	"quarry/signer"
	"quarry/store/chunk"
)

// What Verify fails with, beside ErrMalformed, ErrVersion and the errors of
// signer.Open: signer.ErrWrongKey, ErrAltered, ErrMalformed, ErrPayloadType.
var (
	// ErrNoName says that a tag was asked for and no name statement was given.
	ErrNoName = errors.New("no name statement for the tag")
	// ErrWrongRepo says that the name statement is about another repository.
	ErrWrongRepo = errors.New("statement of another repository")
	// ErrWrongTag says that the name statement is about another tag.
	ErrWrongTag = errors.New("statement of another tag")
	// ErrWrongSource says that the image statement is about another source image.
	ErrWrongSource = errors.New("statement of another source image")
	// ErrWrongPlatform says that the image statement is about another platform.
	ErrWrongPlatform = errors.New("statement of another platform")
	// ErrRollback says that the name statement is older than one seen before.
	ErrRollback = errors.New("older than a name statement already seen")
	// ErrExpired says that the name statement is too old.
	ErrExpired = errors.New("name statement has expired")
)

// Seen is the newest name statement a worker has accepted for one tag. The zero
// value: none yet.
type Seen struct {
	Serial uint64
	Source chunk.Digest
}

// Want is what the caller of Verify asked for and whom it trusts.
type Want struct {
	Ref      Ref
	Platform Platform
	Trust    signer.Trust
	Seen     Seen      // for the repository and tag of Ref
	Now      time.Time // for the expiry; zero: time.Now()
}

// Verified is what two envelopes prove.
type Verified struct {
	ID        chunk.Digest // image id
	Statement Statement
	KeyID     string         // who signed the image statement
	Name      *NameStatement // nil when Ref has a digest: no name was needed
}

// Verify opens the envelopes of an image statement and, for a Ref without a
// digest, of a name statement, and returns what they say when that is about
// exactly what was wanted. With a digest nameEnvelope is not looked at: a digest
// needs no one's word. On success for a tag the caller remembers
// Seen{Name.Serial, Name.Source} durably before it uses the image.
//
// Each way to fail has its own error, listed above; none returns a statement.
func Verify(statementEnvelope, nameEnvelope []byte, w Want) (*Verified, error) {
	v, err := verify(statementEnvelope, nameEnvelope, w)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", w.Ref, err)
	}
	return v, nil
}

func verify(statementEnvelope, nameEnvelope []byte, w Want) (*Verified, error) {
	v := &Verified{}
	source := w.Ref.Digest
	if source == nil {
		name, err := verifyName(nameEnvelope, w)
		if err != nil {
			return nil, err
		}
		v.Name, source = name, &name.Source
	}
	payload, keyID, err := signer.Open(statementEnvelope, StatementType, w.Trust)
	if err != nil {
		if errors.Is(err, signer.ErrAltered) {
			err = fmt.Errorf("%w: convert the image again", err)
		}
		return nil, fmt.Errorf("image statement: %w", err)
	}
	s, err := DecodeStatement(payload)
	if err != nil {
		return nil, err
	}
	if s.Source != *source {
		return nil, fmt.Errorf("%w: want source %s, the image statement has %s: the store answered for another image: convert the image again", ErrWrongSource, *source, s.Source)
	}
	if s.Platform != w.Platform {
		return nil, fmt.Errorf("%w: want %s, the image statement has %s: convert the image for %s, or ask for the platform it has", ErrWrongPlatform, w.Platform, s.Platform, w.Platform)
	}
	v.ID, v.Statement, v.KeyID = ID(payload), s, keyID
	return v, nil
}

func verifyName(envelope []byte, w Want) (*NameStatement, error) {
	if len(envelope) == 0 {
		return nil, fmt.Errorf("%w: the store has no signed word for what %s is: sign it, or pin REPO@sha256:…", ErrNoName, w.Ref)
	}
	payload, _, err := signer.Open(envelope, NameStatementType, w.Trust)
	if err != nil {
		return nil, fmt.Errorf("name statement: %w", err)
	}
	n, err := DecodeNameStatement(payload)
	if err != nil {
		return nil, err
	}
	if n.Repo != w.Ref.Repo {
		return nil, fmt.Errorf("%w: want %s, the name statement has %s", ErrWrongRepo, w.Ref.Repo, n.Repo)
	}
	if n.Tag != w.Ref.Tag {
		return nil, fmt.Errorf("%w: want %s, the name statement has %s", ErrWrongTag, w.Ref.Tag, n.Tag)
	}
	if n.Serial < w.Seen.Serial {
		return nil, fmt.Errorf("%w: serial %d, seen %d: the store serves an old state; pin REPO@sha256:… if you want that one", ErrRollback, n.Serial, w.Seen.Serial)
	}
	if n.Serial == w.Seen.Serial && n.Source != w.Seen.Source {
		return nil, fmt.Errorf("%w: serial %d was seen for source %s and is now for %s: two signers use one serial", ErrRollback, n.Serial, w.Seen.Source, n.Source)
	}
	now := w.Now
	if now.IsZero() {
		now = time.Now()
	}
	if n.Expires != nil && !now.Before(*n.Expires) {
		return nil, fmt.Errorf("%w: on %s, now it is %s: have it signed again, or set this machine's clock",
			ErrExpired, n.Expires.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return &n, nil
}
