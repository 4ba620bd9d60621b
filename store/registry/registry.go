// Package registry keeps what is pushed to /v2/: blobs, manifests, the lists of
// what refers to a manifest, and uploads under way. It stands between the HTTP
// front, which knows requests, and the bucket, which knows objects, so that what a
// push promises is decided in one place: a blob is stored once whoever pushes it,
// a repository sees only what was pushed or mounted into it, a manifest is there
// byte for byte and with all it names, and nothing acknowledged is lost.
package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/names"
)

// What callers branch on. Each wrapped error names the thing.
var (
	ErrBlobUnknown         = errors.New("blob is not in this repository")
	ErrUploadUnknown       = errors.New("upload is unknown or has expired")
	ErrUploadBusy          = errors.New("another request writes to this upload")
	ErrUploadRange         = errors.New("upload does not continue at this offset")
	ErrUploads             = errors.New("too many uploads at once")
	ErrUploadSpace         = errors.New("no room for more uploads")
	ErrHolderUploads       = errors.New("too many uploads of one token at once")
	ErrHolderSpace         = errors.New("no room for more uploads of one token")
	ErrBody                = errors.New("request body")
	ErrDigestInvalid       = errors.New("digest is invalid")
	ErrSizeInvalid         = errors.New("size is invalid")
	ErrTooLarge            = errors.New("too large")
	ErrManifestUnknown     = errors.New("manifest is not in this repository")
	ErrManifestInvalid     = errors.New("manifest is invalid")
	ErrManifestBlobUnknown = errors.New("manifest names what is not in this repository")
	ErrNameInvalid         = errors.New("repository name is invalid")
	ErrNameUnknown         = errors.New("repository is unknown")
	ErrDamaged             = errors.New("stored content is damaged")
)

// Names is what the registry needs of the catalog, whose names are its tags.
type Names interface {
	names.Catalog
	Names() []catalog.Name // by repository, then tag
	Name(repo, tag string) (catalog.Name, bool)
	Tags(repo string) []string
	DeleteName(ctx context.Context, repo, tag string) error
}

// Config is what a Store needs.
type Config struct {
	Bucket bucket.Bucket
	Names  Names
	Key    *signer.Key // signs the names that pushes move; nil: they stay unsigned
	Dir    string      // folder of uploads under way; made when missing

	// Pushed is told of each manifest and tag that is durable, before the client
	// is; its error is the client's. Nil: nobody is told.
	Pushed func(ctx context.Context, p Pushed) error
	// Confirm fails when another writer owns the bucket by now, whose gc knows nothing of
	// what clients of this one are told: who deletes asks it, and a push without a tag, of
	// which the journal is not told. Nil: there is none.
	Confirm func(ctx context.Context) error

	// LayersGo says that layers are dropped when they are converted: CheckWhole does not
	// miss them.
	LayersGo bool

	UploadSpace int64         // bytes of all uploads under way together; 0 = DefaultUploadSpace
	KeepFree    int64         // bytes of the disk that uploads leave free; 0: they may fill it
	SameDisk    bool          // the bucket is on that disk: an upload that ends takes its size once more
	MaxUploads  int           // uploads under way; 0 = 1024
	MaxBlob     int64         // bytes of one blob; 0 = 64 GiB
	UploadIdle  time.Duration // an upload that nothing was written to for so long is removed; 0 = 24 h
	EmptyIdle   time.Duration // and one that has no byte yet; 0 = 10 min
	// HolderUploads bounds the uploads under way of one holder, 0 = a quarter of
	// MaxUploads. Its bytes are bounded by three quarters of UploadSpace.
	HolderUploads int

	Log *slog.Logger // nil = discard
	Now func() time.Time
}

// DefaultUploadSpace bounds the disk that unfinished uploads take: 32 GiB are
// sixteen layers of 2 GiB.
const DefaultUploadSpace = 32 << 30

// Pushed tells what a manifest push made durable.
type Pushed struct {
	Repo string
	// Tag is the name that was moved, "" when the manifest was pushed by digest.
	Tag string
	// Source is the sha256 of the manifest's bytes, whatever digest it was pushed by.
	Source    chunk.Digest
	MediaType string
}

// Store is the registry of one store. Safe for concurrent use, by one process.
type Store struct {
	cfg     Config
	bucket  bucket.Bucket
	names   names.Config
	log     *slog.Logger
	uploads *uploads
	locks   keyLocks // of digests and repositories, see content.go and manifests.go
	recent  *recent
	pushes  pushes
	damaged damaged
}

// Open returns the registry of a bucket and takes up the uploads in cfg.Dir.
func Open(cfg Config) (*Store, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	setDefault(&cfg.UploadSpace, DefaultUploadSpace)
	setDefault(&cfg.MaxUploads, 1024)
	setDefault(&cfg.MaxBlob, 64<<30)
	setDefault(&cfg.UploadIdle, 24*time.Hour)
	setDefault(&cfg.EmptyIdle, min(10*time.Minute, cfg.UploadIdle))
	setDefault(&cfg.HolderUploads, max(1, cfg.MaxUploads/4))
	up, err := openUploads(cfg)
	if err != nil {
		return nil, fmt.Errorf("open uploads in %s: %w", cfg.Dir, err)
	}
	return &Store{
		cfg: cfg, bucket: cfg.Bucket, log: cfg.Log, uploads: up,
		names:  names.Config{Catalog: cfg.Names, Key: cfg.Key, Now: cfg.Now},
		recent: newRecent(cfg.Now),
	}, nil
}

func setDefault[T int | int64 | time.Duration](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Open returns the content of a blob or manifest, whichever repository it is in,
// for the converter. The reader fails at its end when the bytes are not those of
// the digest. Errors: ErrBlobUnknown.
func (s *Store) Open(ctx context.Context, d digest.Digest) (io.ReadCloser, int64, error) {
	c, err := s.find(ctx, d)
	if err != nil {
		return nil, 0, err
	}
	return io.NopCloser(c.Reader(ctx, 0, c.Size)), c.Size, nil
}

// Has reports whether the content of a digest is stored, in whichever repository.
func (s *Store) Has(ctx context.Context, d digest.Digest) (bool, error) {
	_, err := FindContent(ctx, s.bucket, d)
	if errors.Is(err, ErrBlobUnknown) {
		return false, nil
	}
	return err == nil, err
}
