package image

import "quarry/store/chunk"

// ImagesPrefix starts the keys of all image statements and their signatures.
const ImagesPrefix = "images/"

// BootstrapKey is the key of a bootstrap, by its digest.
func BootstrapKey(d chunk.Digest) string { return "bootstraps/" + d.Hex() }

// ConfigKey is the key of a raw OCI config, by its digest.
func ConfigKey(d chunk.Digest) string { return "configs/" + d.Hex() }

// BlobKey is the key of the object that says which bootstrap has the virtual
// blob v; its body is the bootstrap's digest as text.
func BlobKey(v chunk.Digest) string { return "blobs/" + v.Hex() }

// LayerKey is the key of a layer record, by the digest of the compressed layer.
func LayerKey(d chunk.Digest) string { return "layers/" + d.Hex() }

// StatementKey is the key of an image statement's payload.
func StatementKey(source chunk.Digest, p Platform) string {
	return ImagesPrefix + source.Hex() + "/" + p.Key() + "/statement"
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
