package image_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"quarry/signer"
	"quarry/store/image"
)

func sealed(t testing.TB, k *signer.Key, payloadType string, payload []byte) []byte {
	t.Helper()
	env, err := signer.Envelope{PayloadType: payloadType, Payload: payload, Signatures: []signer.Signature{signer.Sign(k, payloadType, payload)}}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return env
}

func generate(t testing.TB) *signer.Key {
	t.Helper()
	k, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func parseRef(t testing.TB, s string) image.Ref {
	t.Helper()
	r, err := image.ParseRef(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// question is a good pair of envelopes and what was asked; tests change it.
type question struct {
	statement, name []byte
	want            image.Want
}

func goodQuestion(t testing.TB, k *signer.Key) question {
	t.Helper()
	n := exampleName()
	expires := n.Issued.Add(time.Hour)
	n.Expires = &expires
	return question{
		statement: sealed(t, k, image.StatementType, encodeStatement(t, exampleStatement())),
		name:      sealed(t, k, image.NameStatementType, encodeName(t, n)),
		want: image.Want{
			Ref:      parseRef(t, "library/debian:12"),
			Platform: image.Platform{OS: "linux", Arch: "amd64"},
			Trust:    signer.NewTrust(k.Public()),
			Seen:     image.Seen{Serial: 7, Source: digest("source")},
			Now:      n.Issued.Add(time.Minute),
		},
	}
}

func TestVerifyATag(t *testing.T) {
	k := generate(t)
	q := goodQuestion(t, k)
	v, err := image.Verify(q.statement, q.name, q.want)
	if err != nil {
		t.Fatal(err)
	}
	if v.ID != image.ID(encodeStatement(t, exampleStatement())) || v.Statement.Tree != digest("tree") || v.Name.Serial != 7 || v.KeyID != k.Public().ID() {
		t.Fatalf("Verify = %+v", v)
	}
}

func TestVerifyADigestNeedsNoName(t *testing.T) {
	q := goodQuestion(t, generate(t))
	for _, ref := range []string{"any/repo@" + digest("source").String(), "any/repo:tag@" + digest("source").String()} {
		q.want.Ref = parseRef(t, ref)
		v, err := image.Verify(q.statement, nil, q.want)
		if err != nil || v.Name != nil || v.Statement.Source != digest("source") {
			t.Fatalf("%s: %+v, %v", ref, v, err)
		}
	}
}

func TestVerifyRefuses(t *testing.T) {
	k, other := generate(t), generate(t)
	flip := func(b []byte, at string) []byte {
		b = bytes.Clone(b)
		b[bytes.Index(b, []byte(at))+len(at)] ^= 1
		return b
	}
	rename := func(change func(*image.NameStatement)) func(*question) {
		return func(q *question) {
			n := exampleName()
			change(&n)
			q.name = sealed(t, k, image.NameStatementType, encodeName(t, n))
		}
	}
	for _, tc := range []struct {
		name   string
		change func(*question)
		want   error
		says   string
	}{
		{"an image statement by another key", func(q *question) {
			q.statement = sealed(t, other, image.StatementType, encodeStatement(t, exampleStatement()))
		}, signer.ErrWrongKey, other.Public().ID()},
		{"a name statement by another key", func(q *question) {
			q.name = sealed(t, other, image.NameStatementType, encodeName(t, exampleName()))
		}, signer.ErrWrongKey, other.Public().ID()},
		{"nobody is trusted", func(q *question) { q.want.Trust = signer.Trust{} }, signer.ErrWrongKey, "trusted: none"},
		{"another repository", rename(func(n *image.NameStatement) { n.Repo = "library/ubuntu" }), image.ErrWrongRepo, "want library/debian, the name statement has library/ubuntu"},
		{"another tag", rename(func(n *image.NameStatement) { n.Tag = "11" }), image.ErrWrongTag, "want 12, the name statement has 11"},
		{"a name of another source", rename(func(n *image.NameStatement) { n.Source, n.Serial = digest("y"), 8 }), image.ErrWrongSource, digest("y").String()},
		{"another digest", func(q *question) { q.want.Ref = parseRef(t, "a@"+digest("y").String()) }, image.ErrWrongSource, digest("source").String()},
		{"another platform", func(q *question) { q.want.Platform.Arch = "arm64" }, image.ErrWrongPlatform, "want linux/arm64, the image statement has linux/amd64"},
		{"a lower serial", rename(func(n *image.NameStatement) { n.Serial = 6 }), image.ErrRollback, "serial 6, seen 7"},
		{"one serial for two sources", rename(func(n *image.NameStatement) { n.Source = digest("y") }), image.ErrRollback, "two signers"},
		{"expired", func(q *question) { q.want.Now = exampleName().Issued.Add(time.Hour) }, image.ErrExpired, "2021-01-02T04:04:05Z"},
		{"expired by the real clock", func(q *question) { q.want.Now = time.Time{} }, image.ErrExpired, ""},
		{"an altered image statement", func(q *question) { q.statement = flip(q.statement, `{"payload":"eyJ`) }, signer.ErrAltered, "image statement"},
		{"an altered name statement", func(q *question) { q.name = flip(q.name, `{"payload":"eyJ`) }, signer.ErrAltered, "name statement"},
		{"no name statement", func(q *question) { q.name = nil }, image.ErrNoName, "pin REPO@sha256"},
		{"no image statement", func(q *question) { q.statement = nil }, signer.ErrMalformed, "image statement"},
		{"the two exchanged", func(q *question) { q.statement, q.name = q.name, q.statement }, signer.ErrPayloadType, "name statement"},
		{"a signed image statement of a newer version", func(q *question) {
			q.statement = sealed(t, k, image.StatementType, []byte(`{"version":2}`))
		}, image.ErrVersion, "version 2"},
		{"a signed name statement that is none", func(q *question) {
			q.name = sealed(t, k, image.NameStatementType, []byte(`{"version":1}`))
		}, image.ErrMalformed, "name statement"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			q := goodQuestion(t, k)
			tc.change(&q)
			v, err := image.Verify(q.statement, q.name, q.want)
			if v != nil || !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
				t.Fatalf("%+v, %v; want %v that says %q", v, err, tc.want, tc.says)
			}
			if !strings.Contains(err.Error(), q.want.Ref.String()) {
				t.Fatalf("%v does not name the image", err)
			}
		})
	}
}

func TestAFlippedBitInAnyByteOfEitherEnvelopeIsRefused(t *testing.T) {
	q := goodQuestion(t, generate(t))
	for _, env := range [][]byte{q.statement, q.name} {
		for i := range env {
			env[i] ^= 1 << (i % 8)
			if v, err := image.Verify(q.statement, q.name, q.want); err == nil {
				t.Fatalf("byte %d changed: accepted as %+v", i, v)
			}
			env[i] ^= 1 << (i % 8)
		}
	}
	if _, err := image.Verify(q.statement, q.name, q.want); err != nil {
		t.Fatal(err)
	}
}
