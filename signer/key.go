package signer

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"syscall"

	"quarry/internal/durable"
	"quarry/store/chunk"
)

const (
	// maxKeyFile bounds a key file; a PEM Ed25519 key has about 120 bytes.
	maxKeyFile = 16 << 10

	pemPrivate = "PRIVATE KEY" // PKCS#8
	pemPublic  = "PUBLIC KEY"  // SubjectPublicKeyInfo
)

// Key is a private Ed25519 key. Printing it in any way shows its key id only.
type Key struct {
	// A function, as fmt cannot look into one: for a Key in an unexported field of
	// something else it does not call Format, and it follows pointers.
	priv func() ed25519.PrivateKey
	pub  PublicKey
}

// PublicKey is the public half of a Key. Comparable.
type PublicKey struct {
	key [ed25519.PublicKeySize]byte
}

// Generate makes a new random key.
func Generate() (*Key, error) {
	_, priv, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, fmt.Errorf("generate key: %w", err)
	}
	return newKey(priv), nil
}

func newKey(priv ed25519.PrivateKey) *Key {
	return &Key{
		priv: func() ed25519.PrivateKey { return priv },
		pub:  PublicKey{key: [ed25519.PublicKeySize]byte(priv.Public().(ed25519.PublicKey))},
	}
}

// LoadKey reads a private key from a PKCS#8 PEM file, and refuses a file that
// others than its owner may read or write.
func LoadKey(path string) (*Key, error) {
	b, info, err := readKeyFile(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("private key %s: others may read or write it (mode %#o): run chmod 600 %s, and make a new key if they may have",
			path, info.Mode().Perm(), path)
	}
	der, err := decodePEM(b, pemPrivate)
	if err != nil {
		return nil, fmt.Errorf("private key %s: %w", path, err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("private key %s: %w: %w", path, ErrMalformed, err)
	}
	priv, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("private key %s: %w: want an Ed25519 key (quarry keygen makes one), this is a %T", path, ErrMalformed, parsed)
	}
	return newKey(priv), nil
}

// Save writes the key to a new PKCS#8 PEM file that only its owner can read,
// durably. It never replaces a file: a lost private key cannot be had again.
func (k *Key) Save(path string) error {
	der, err := x509.MarshalPKCS8PrivateKey(k.priv())
	if err != nil {
		return fmt.Errorf("private key %s: %w", path, err)
	}
	if err := createKeyFile(path, encodePEM(pemPrivate, der), 0o600); err != nil {
		return fmt.Errorf("private key %s: %w", path, err)
	}
	return nil
}

// Public returns the public half.
func (k *Key) Public() PublicKey { return k.pub }

// String names the key without its secret.
func (k Key) String() string { return "signer.Key[redacted, id " + k.pub.ID() + "]" }

// Format prints String for every verb, %x and %#v among them.
func (k Key) Format(f fmt.State, _ rune) { io.WriteString(f, k.String()) }

// LogValue is what slog sees.
func (k Key) LogValue() slog.Value { return slog.StringValue(k.String()) }

// LoadPublicKey reads a public key from a SubjectPublicKeyInfo PEM file.
func LoadPublicKey(path string) (PublicKey, error) {
	b, _, err := readKeyFile(path)
	if err != nil {
		return PublicKey{}, err
	}
	p, err := parsePublic(b)
	if err != nil {
		return PublicKey{}, fmt.Errorf("public key %s: %w", path, err)
	}
	return p, nil
}

func parsePublic(b []byte) (PublicKey, error) {
	der, err := decodePEM(b, pemPublic)
	if err != nil {
		return PublicKey{}, err
	}
	parsed, err := x509.ParsePKIXPublicKey(der)
	if err != nil {
		return PublicKey{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	pub, ok := parsed.(ed25519.PublicKey)
	if !ok {
		return PublicKey{}, fmt.Errorf("%w: want an Ed25519 key, this is a %T", ErrMalformed, parsed)
	}
	p := PublicKey{key: [ed25519.PublicKeySize]byte(pub)}
	if !bytes.Equal(p.spki(), der) {
		// A second encoding of one key would give it a second key id.
		return PublicKey{}, fmt.Errorf("%w: the key is not in its shortest DER form", ErrMalformed)
	}
	return p, nil
}

// Save writes the key to a new SubjectPublicKeyInfo PEM file, durably. It never
// replaces a file.
func (p PublicKey) Save(path string) error {
	if err := createKeyFile(path, encodePEM(pemPublic, p.spki()), 0o644); err != nil {
		return fmt.Errorf("public key %s: %w", path, err)
	}
	return nil
}

// ID returns the key id: the SHA-256 of the key's SubjectPublicKeyInfo DER as
// hex digits.
func (p PublicKey) ID() string { return chunk.Sum(p.spki()).Hex() }

// String returns the key id.
func (p PublicKey) String() string { return p.ID() }

func (p PublicKey) spki() []byte {
	der, err := x509.MarshalPKIXPublicKey(ed25519.PublicKey(p.key[:]))
	if err != nil {
		panic("signer: an Ed25519 public key always has a DER form: " + err.Error())
	}
	return der
}

func encodePEM(blockType string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: blockType, Bytes: der})
}

// decodePEM takes a file of exactly one PEM block of the wanted type.
func decodePEM(b []byte, blockType string) ([]byte, error) {
	block, rest := pem.Decode(b)
	if block == nil {
		return nil, fmt.Errorf("%w: no PEM block, want -----BEGIN %s-----", ErrMalformed, blockType)
	}
	if block.Type == pemPrivate && blockType == pemPublic {
		return nil, fmt.Errorf("%w: this is a private key: keep it secret and give its .pub file instead", ErrMalformed)
	}
	if block.Type != blockType {
		return nil, fmt.Errorf("%w: PEM block %q, want %q", ErrMalformed, block.Type, blockType)
	}
	if len(block.Headers) != 0 || len(bytes.TrimSpace(rest)) != 0 || !bytes.HasPrefix(b, []byte("-----BEGIN ")) {
		return nil, fmt.Errorf("%w: want one PEM block without headers and nothing else in the file", ErrMalformed)
	}
	return block.Bytes, nil
}

// readKeyFile reads a bounded regular file. It opens without blocking, as the
// path may be a FIFO.
func readKeyFile(path string) ([]byte, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("key: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("key: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxKeyFile {
		return nil, nil, fmt.Errorf("key %s: %w: want a regular file of at most %d bytes", path, ErrMalformed, maxKeyFile)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxKeyFile))
	if err != nil {
		return nil, nil, fmt.Errorf("key: %w", err)
	}
	return b, info, nil
}

// createKeyFile creates path durably, with all of b in it or not at all.
func createKeyFile(path string, b []byte, perm fs.FileMode) error {
	err := durable.CreateFile(path, b, perm)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("a key is never overwritten: move the old one away or choose another path: %w", err)
	}
	return err
}
