package signer

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// ErrNoKeys says that a trust folder holds no public key.
var ErrNoKeys = errors.New("no *.pub file")

// maxTrusted bounds the keys of one trust folder.
const maxTrusted = 1024

// Trust is the set of public keys whose signatures count. The zero value trusts
// nobody. Immutable, safe for concurrent use.
type Trust struct {
	keys map[string]PublicKey // by key id
}

// NewTrust returns the set of the given keys.
func NewTrust(keys ...PublicKey) Trust {
	t := Trust{keys: make(map[string]PublicKey, len(keys))}
	for _, k := range keys {
		t.keys[k.ID()] = k
	}
	return t
}

// LoadTrust reads the trusted keys: one public key file, or a folder, of which
// each file *.pub is one. A bad file among them is an error, as a key that is
// silently missing shows only later and elsewhere. So is a folder without any.
func LoadTrust(fileOrDir string) (Trust, error) {
	info, err := os.Stat(fileOrDir)
	if err != nil {
		return Trust{}, fmt.Errorf("trusted keys: %w", err)
	}
	paths := []string{fileOrDir}
	if info.IsDir() {
		if paths, err = pubFiles(fileOrDir); err != nil {
			return Trust{}, fmt.Errorf("trusted keys: %w", err)
		}
	}
	keys := make([]PublicKey, len(paths))
	for i, path := range paths {
		if keys[i], err = LoadPublicKey(path); err != nil {
			return Trust{}, fmt.Errorf("trusted keys: %w", err)
		}
	}
	return NewTrust(keys...), nil
}

func pubFiles(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".pub" {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("folder %s: %w: copy the signer's public key there (keys/signing.pub of the converter's data folder)", dir, ErrNoKeys)
	}
	if len(paths) > maxTrusted {
		return nil, fmt.Errorf("folder %s has %d *.pub files, at most %d", dir, len(paths), maxTrusted)
	}
	return paths, nil
}

// KeyIDs returns the ids of the trusted keys, sorted.
func (t Trust) KeyIDs() []string { return slices.Sorted(maps.Keys(t.keys)) }
