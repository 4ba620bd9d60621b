package image

import (
	"strings"

	"quarry/store/chunk"
)

const (
	// ImagesPrefix starts the keys of all image statements and their signatures.
	ImagesPrefix = "images/"
	// LayersPrefix starts the keys of all layer records.
	LayersPrefix = "layers/"
)

// BootstrapKey is the key of a bootstrap, by its digest.
func BootstrapKey(d chunk.Digest) string { return "bootstraps/" + d.Hex() }

// ConfigKey is the key of a raw OCI config, by its digest.
func ConfigKey(d chunk.Digest) string { return "configs/" + d.Hex() }

// BlobKey is the key of the object that says which bootstrap has the virtual
// blob v; its body is the bootstrap's digest as text. Of several bootstraps with
// one virtual blob it names any, and stays with the one it named first.
func BlobKey(v chunk.Digest) string { return "blobs/" + v.Hex() }

// LayerKey is the key of a layer record, by the digest of the compressed layer.
func LayerKey(d chunk.Digest) string { return LayersPrefix + d.Hex() }

// StatementKey is the key of an image statement's payload. The object is replaced
// when another converter version makes another statement of the same source; its
// signatures are deleted before that and written after it. So whoever reads the
// statement, then the signatures, and then the same statement once more, has
// signatures of that statement.
func StatementKey(source chunk.Digest, p Platform) string {
	return ImagesPrefix + source.Hex() + "/" + p.Key() + "/statement"
}

// ParseStatementKey is the inverse of StatementKey.
func ParseStatementKey(key string) (source chunk.Digest, p Platform, ok bool) {
	hex, rest, _ := strings.Cut(strings.TrimPrefix(key, ImagesPrefix), "/")
	platform, _, _ := strings.Cut(rest, "/")
	source, err := chunk.ParseHex(hex)
	if err != nil {
		return chunk.Digest{}, Platform{}, false
	}
	p, err = ParsePlatform(strings.ReplaceAll(platform, "-", "/"))
	if err != nil || StatementKey(source, p) != key {
		return chunk.Digest{}, Platform{}, false
	}
	return source, p, true
}

// SigPrefix starts the keys of an image statement's signatures.
func SigPrefix(source chunk.Digest, p Platform) string {
	return ImagesPrefix + source.Hex() + "/" + p.Key() + "/sigs/"
}

// SigKey is the key of one key's signature of an image statement. keyID is 64
// hex digits, as a decoded signer.Signature has it.
func SigKey(source chunk.Digest, p Platform, keyID string) string {
	return SigPrefix(source, p) + keyID
}
