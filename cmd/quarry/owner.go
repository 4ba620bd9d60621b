package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/api/page"
	"quarry/chunkindex"
	"quarry/internal/durable"
	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/bucket/ranges"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/follow"
	"quarry/store/jobs"
	"quarry/store/packed"
	"quarry/store/registry"
	"quarry/worker/folder"
)

// dataDir names the parts of a data folder.
type dataDir string

func (d dataDir) lock() string         { return filepath.Join(string(d), "lock") }
func (d dataDir) bucket() string       { return filepath.Join(string(d), "bucket") }
func (d dataDir) bucketFile() string   { return filepath.Join(string(d), "bucket.json") }
func (d dataDir) index() string        { return filepath.Join(string(d), "index") }
func (d dataDir) tmp() string          { return filepath.Join(string(d), "tmp") }
func (d dataDir) uploads() string      { return filepath.Join(string(d), "uploads") }
func (d dataDir) idFile() string       { return filepath.Join(string(d), "id") }
func (d dataDir) readOnlyFile() string { return filepath.Join(string(d), "read-only") }
func (d dataDir) noSignFile() string   { return filepath.Join(d.keys(), "no-sign") }
func (d dataDir) keys() string         { return filepath.Join(string(d), "keys") }
func (d dataDir) signingKey() string   { return filepath.Join(d.keys(), "signing.key") }
func (d dataDir) signingPub() string   { return filepath.Join(d.keys(), "signing.pub") }
func (d dataDir) converterKey() string { return filepath.Join(d.keys(), "converter.key") }
func (d dataDir) run() string          { return filepath.Join(string(d), "run") }
func (d dataDir) socket() string       { return filepath.Join(d.run(), "quarry.sock") }
func (d dataDir) serveLog() string     { return filepath.Join(d.run(), "serve.log") }

// exists reports whether a store was ever made in the folder. That it cannot be
// told is an error.
func (d dataDir) exists() (bool, error) {
	_, made, err := d.remembered()
	return made, err
}

// wrap names the folder in an error, and what it takes to work on it.
func (d dataDir) wrap(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("data folder %s: %w: it must be writable for this user, even to read images from it", d, err)
	}
	return fmt.Errorf("data folder %s: %w", d, err)
}

// maxData bounds a data folder's path: with run/quarry.sock it must fit a socket
// address, of 108 bytes.
const maxData = 80

// openDataDir returns the data folder with an absolute path, because processes
// started later have another working directory. It makes nothing.
func openDataDir(path string) (dataDir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if !utf8.ValidString(abs) {
		return "", fmt.Errorf("%w: data folder %q: its path is not UTF-8, which is all that mounts can record: rename it, or make a link to it that has another name", errUsage, abs)
	}
	if len(abs) > maxData {
		return "", fmt.Errorf("data folder %s: the path has %d bytes, at most %d fit a socket address", abs, len(abs), maxData)
	}
	return dataDir(abs), nil
}

// owner is the one process that has a data folder open: everything that needs
// the index or writes the bucket happens in it.
type owner struct {
	dir      dataDir
	lock     *proc.Lock
	bucket   storage
	ranges   *ranges.Cache // nil: a bucket that is a folder, or no cache of another one
	catalog  *catalog.Catalog
	index    *chunkindex.Index
	store    *packed.Store
	registry *registry.Store
	jobs     *jobs.Queue // nil on a node that only reads
	jobOptions
	meta    packed.Meta
	signing *signer.Key // nil: images stay unsigned
	macKey  []byte
	limits  limits // of conversions
	metrics *packed.Metrics
	page    *page.Page // nil: nobody serves this owner
	log     *slog.Logger
	upkeep  *upkeep // nil until all else is open
	// collected has the metrics of all that this process runs, for /metrics.
	collected *prometheus.Registry

	self     catalog.Writer
	working  sync.WaitGroup   // what start has begun
	mark     *mark            // nil on a node that only reads, and until it writes
	follower *follow.Follower // nil on the writer
}

// ownerConfig says how to open a data folder.
type ownerConfig struct {
	dir         dataDir
	bucket      place     // without a URL: as the folder remembers it
	cache       cacheSize // of ranges of packs
	keyFile     string    // signs instead of keys/signing.key
	noSign      bool
	workers     int
	uploadSpace int64 // 0 is the default
	jobs        jobOptions
	background  bool // gives way to a server that a person starts
	readOnly    bool // follows the writer, and changes nothing
	limits      limits
	gcEvery     time.Duration    // 0: only when told
	retain      *time.Duration   // of gc; nil = its default
	grace       *time.Duration   // of gc; nil = as the bucket needs it
	takeover    time.Duration    // how long a writer's mark stands still before its store is taken over; 0 = writer.After
	waiting     func(who string) // is told of a writer that lives; may be nil
	log         *slog.Logger
}

// openOwner opens a data folder, making what is missing of it.
func openOwner(ctx context.Context, cfg ownerConfig) (*owner, error) {
	o, err := lockOwner(cfg)
	if err != nil {
		return nil, err
	}
	return o, o.open(ctx, cfg)
}

// lockOwner makes the folders and takes the lock: proc.ErrLocked when somebody has it.
func lockOwner(cfg ownerConfig) (_ *owner, err error) {
	for _, sub := range []string{string(cfg.dir), cfg.dir.keys(), cfg.dir.run(), cfg.dir.tmp()} {
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return nil, cfg.dir.wrap(err)
		}
	}
	o := &owner{dir: cfg.dir, limits: cfg.limits, metrics: packed.NewMetrics(), collected: prometheus.NewRegistry(), log: cfg.log}
	if o.lock, err = proc.TryLock(cfg.dir.lock()); err != nil {
		return nil, cfg.dir.wrap(err)
	}
	if err := errors.Join(cfg.dir.makeRoom(cfg.log), writeHolder(o.lock, cfg.background)); err != nil {
		return nil, errors.Join(cfg.dir.wrap(err), o.close())
	}
	return o, nil
}

// open opens what is in a folder whose lock is held, or releases the lock.
func (o *owner) open(ctx context.Context, cfg ownerConfig) (err error) {
	defer func() {
		if err != nil {
			o.close()
		}
	}()
	if err := o.openKeys(cfg); err != nil {
		return err
	}
	if cfg.readOnly {
		if err := cfg.dir.rememberReadOnly(); err != nil {
			return err
		}
	}
	if err := o.openBucket(ctx, cfg); err != nil {
		return err
	}
	if err := o.openCatalog(ctx, cfg); err != nil {
		return err
	}
	if err := o.warnOfAnotherKey(ctx); err != nil {
		return err
	}
	if o.index, err = chunkindex.Open(chunkindex.Config{Dir: cfg.dir.index(), Log: cfg.log}); err != nil {
		return err
	}
	o.store, err = packed.Open(ctx, packed.Config{
		Bucket: o.bucket, Ranges: o.ranges, Catalog: o.catalog, Index: o.index, ChunkSize: o.meta.ChunkSize,
		TmpDir: cfg.dir.tmp(), Workers: cfg.workers, Log: cfg.log,
		Metrics: o.metrics, ReadOnly: cfg.readOnly,
	})
	if err != nil {
		return err
	}
	if err := o.openRegistry(cfg); err != nil {
		return err
	}
	if cfg.readOnly {
		o.follower = follow.New(follow.Config{Store: o.store, Applied: o.catalog.Applied, Log: cfg.log})
		return o.openUpkeep(ctx, cfg)
	}
	if err := o.openJobs(ctx, cfg); err != nil {
		return err
	}
	return o.openUpkeep(ctx, cfg)
}

// openBucket opens the bucket and reads what store it is, or makes it one.
func (o *owner) openBucket(ctx context.Context, cfg ownerConfig) error {
	at, news, err := cfg.dir.chooseBucket(cfg.bucket)
	if err != nil {
		return err
	}
	if o.bucket, err = cfg.dir.openBucket(ctx, at, cfg.readOnly); err != nil {
		return err
	}
	if news {
		if err := cfg.dir.remember(at); err != nil {
			return err
		}
	}
	if err := o.openRanges(ctx, cfg, at); err != nil {
		return err
	}
	o.meta, err = packed.OpenMeta(ctx, o.bucket)
	if errors.Is(err, bucket.ErrNotFound) && !cfg.readOnly {
		o.meta, err = packed.CreateMeta(ctx, o.bucket, chunk.DefaultSize, time.Now())
	}
	if errors.Is(err, packed.ErrMeta) {
		err = fmt.Errorf("%w: %s: %w: remove it, the next command makes it anew and all images stay", errDamage, at.url.object(cfg.dir, packed.MetaKey), err)
	}
	return noStore(err)
}

func (o *owner) close() error {
	var errs []error
	if o.page != nil {
		o.page.Close() // it reads index and bucket
	}
	if o.upkeep != nil {
		o.upkeep.close()
	}
	if o.mark != nil {
		o.mark.stop()
	}
	if o.registry != nil {
		errs = append(errs, o.registry.Close())
	}
	if o.index != nil {
		errs = append(errs, o.index.Close())
	}
	if o.ranges != nil {
		errs = append(errs, o.ranges.Close())
	}
	if o.bucket != nil {
		errs = append(errs, o.bucket.Close())
	}
	if o.lock != nil {
		o.lock.Unlock()
	}
	return errors.Join(errs...)
}

// holder is the process that holds a data folder's lock, as it says in the
// lock's file.
type holder struct {
	PID        int    `json:"pid"`
	Start      uint64 `json:"start"` // clock ticks since boot: numbers are used again
	Background bool   `json:"background"`
}

func writeHolder(l *proc.Lock, background bool) error {
	start, err := attach.ProcessStart(os.Getpid())
	if err != nil {
		return err
	}
	b, err := json.Marshal(holder{PID: os.Getpid(), Start: start, Background: background})
	if err != nil {
		return err
	}
	return l.Write(b)
}

// maxOwnFile bounds the small files of a data folder: 100 bytes or less of
// the lock, and 65 of a key.
const maxOwnFile = 4 << 10

// readHolder returns who holds the lock; false when nobody living says so.
func readHolder(d dataDir) (holder, bool) {
	var h holder
	raw, err := folder.ReadBounded(d.lock(), maxOwnFile)
	if err != nil || json.Unmarshal(raw, &h) != nil || h.PID == 0 {
		return h, false
	}
	start, err := attach.ProcessStart(h.PID)
	return h, err == nil && start == h.Start
}

// converterKeySize is the size of the layer records' MAC key, in bytes.
const converterKeySize = 32

func (o *owner) openKeys(cfg ownerConfig) (err error) {
	if cfg.readOnly {
		return nil // it signs nothing, and what it serves is verified by who reads it
	}
	if o.macKey, err = loadConverterKey(cfg.dir.converterKey()); err != nil {
		return err
	}
	noSign, err := cfg.dir.chooseNoSign(cfg.noSign, cfg.background)
	if err != nil {
		return cfg.dir.wrap(err)
	}
	switch {
	case noSign:
	case cfg.keyFile != "":
		o.signing, err = signer.LoadKey(cfg.keyFile)
	default:
		o.signing, err = loadSigningKey(cfg.dir)
	}
	if err != nil {
		return err
	}
	trust, err := o.accepted()
	if errors.Is(err, signer.ErrMalformed) {
		err = fmt.Errorf("%w: %w: put the right file back, or remove it: %s is made again from %s",
			errDamage, err, cfg.dir.signingPub(), cfg.dir.signingKey())
	}
	if err != nil || o.signing == nil {
		return err
	}
	return checkTrusted(cfg, o.signing.Public().ID(), trust)
}

// checkTrusted refuses a signing key that the folder does not trust: every
// conversion would end well and make an image that no command takes.
func checkTrusted(cfg ownerConfig, id string, trust signer.Trust) error {
	switch {
	case slices.Contains(trust.KeyIDs(), id):
		return nil
	case cfg.keyFile != "":
		return fmt.Errorf("--key %s: its public key %s is not in %s, so this folder would not trust what it signs: copy it there, keygen has written it to %s.pub",
			cfg.keyFile, id, cfg.dir.keys(), cfg.keyFile)
	}
	return fmt.Errorf("%s has public key %s, which is none of those in %s: one of the two files was replaced or is damaged; put the right one back, or remove %s to trust this key and convert again what another one signed",
		cfg.dir.signingKey(), id, cfg.dir.keys(), cfg.dir.signingPub())
}

// loadSigningKey loads the folder's own key, and makes it or its public half
// when it is missing.
func loadSigningKey(d dataDir) (*signer.Key, error) {
	key, err := signer.LoadKey(d.signingKey())
	if err == nil {
		if _, serr := os.Stat(d.signingPub()); errors.Is(serr, fs.ErrNotExist) {
			err = key.Public().Save(d.signingPub())
		}
	}
	if errors.Is(err, signer.ErrMalformed) {
		return nil, fmt.Errorf("%w: %w: put the right file back, or, to go on with a new key, move %s to old.pub in its folder, so that what it proves stays trusted, and remove %s",
			errDamage, err, d.signingPub(), d.signingKey())
	}
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if key, err = signer.Generate(); err != nil {
		return nil, err
	}
	// The public half first: a key whose public half is missing would sign
	// images that this folder itself does not trust.
	if err := os.Remove(d.signingPub()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := key.Public().Save(d.signingPub()); err != nil {
		return nil, err
	}
	return key, key.Save(d.signingKey())
}

func loadConverterKey(path string) ([]byte, error) {
	return loadMACKey(path, "converter key", "layers are read anew")
}

// loadMACKey loads a symmetric key of the folder, and makes it when it is missing.
// lost is what follows when it is made anew.
func loadMACKey(path, name, lost string) ([]byte, error) {
	raw, err := folder.ReadBounded(path, maxOwnFile)
	if errors.Is(err, fs.ErrNotExist) {
		key := make([]byte, converterKeySize)
		rand.Read(key)
		return key, durable.WriteFile(path, []byte(hex.EncodeToString(key)+"\n"), 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	key, err := hex.DecodeString(strings.TrimSpace(string(raw)))
	if err != nil || len(key) != converterKeySize {
		return nil, fmt.Errorf("%w: %s %s: want %d hex digits; remove it and %s", errDamage, name, path, 2*converterKeySize, lost)
	}
	return key, nil
}
