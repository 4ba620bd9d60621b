package registry

import (
	_ "crypto/sha256" // the two algorithms that are kept
	_ "crypto/sha512"
	"fmt"
	"strings"

	"github.com/opencontainers/go-digest"
)

// ParseDigest reads a digest of an algorithm that the registry keeps: sha256 or
// sha512, in lower-case hex digits. Errors: ErrDigestInvalid.
func ParseDigest(s string) (digest.Digest, error) {
	alg, hex, _ := strings.Cut(s, ":")
	if a := digest.Algorithm(alg); a != digest.SHA256 && a != digest.SHA512 {
		return "", fmt.Errorf("%w: %.160q: want sha256:<64 hex digits> or sha512:<128 hex digits>", ErrDigestInvalid, s)
	}
	if err := digest.Algorithm(alg).Validate(hex); err != nil {
		return "", fmt.Errorf("%w: %.160q: want lower-case hex digits, %d of them", ErrDigestInvalid, s, 2*digest.Algorithm(alg).Size())
	}
	return digest.Digest(s), nil
}

// The keys of the registry's objects; FORMAT.md tells what is in them. The first
// byte of a repository's elements is a letter or digit, so those with '_' are never
// parts of a repository's name.
const (
	// BlobsPrefix starts the keys of the content of blobs and manifests.
	BlobsPrefix = "oci/blobs/"
	// ReposPrefix starts the keys of what the repositories consist of.
	ReposPrefix = "oci/repos/"

	blobsElem     = "/_blobs/"
	manifestsElem = "/_manifests/"
	referrersElem = "/_referrers/"
)

// elems is a digest as two elements of a key.
func elems(d digest.Digest) string { return d.Algorithm().String() + "/" + d.Encoded() }

// ContentKey is the key of the content of a blob or manifest.
func ContentKey(d digest.Digest) string { return BlobsPrefix + elems(d) }

// ParseContentKey is the inverse of ContentKey.
func ParseContentKey(key string) (digest.Digest, bool) {
	d, err := parseElems(strings.TrimPrefix(key, BlobsPrefix))
	return d, err == nil && ContentKey(d) == key
}

// BlobKey is the key of the record that a repository has a blob.
func BlobKey(repo string, d digest.Digest) string { return ReposPrefix + repo + blobsElem + elems(d) }

// ManifestsPrefix starts the keys of the manifest records of a repository.
func ManifestsPrefix(repo string) string { return ReposPrefix + repo + manifestsElem }

// ManifestKey is the key of the record of a manifest.
func ManifestKey(repo string, d digest.Digest) string { return ManifestsPrefix(repo) + elems(d) }

// ReferrersPrefix starts the keys of what refers to subject in a repository.
func ReferrersPrefix(repo string, subject digest.Digest) string {
	return ReposPrefix + repo + referrersElem + elems(subject) + "/"
}

// ReferrerKey is the key of the descriptor of one manifest that refers to subject.
func ReferrerKey(repo string, subject, d digest.Digest) string {
	return ReferrersPrefix(repo, subject) + elems(d)
}

// parseElems is the inverse of elems.
func parseElems(s string) (digest.Digest, error) {
	return ParseDigest(strings.Replace(s, "/", ":", 1))
}
