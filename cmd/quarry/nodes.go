package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	"quarry/api"
	front "quarry/api/registry"
	"quarry/internal/durable"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/writer"
	"quarry/worker/folder"
)

const (
	// minTakeover is three renewals of a writer's mark: less would take the store from
	// a writer that lives.
	minTakeover = 3 * writer.Every
	// fencedTime is how long a writer that was fenced goes on to serve reads.
	fencedTime = 10 * time.Second
	// releaseTime bounds the last renewal of a mark.
	releaseTime = 5 * time.Second
	// folderIDSize is the size of a data folder's id in bytes.
	folderIDSize = 16
)

// openCatalog reads the journal, on a node that may write when no other one does.
func (o *owner) openCatalog(ctx context.Context, cfg ownerConfig) (err error) {
	if cfg.readOnly {
		o.catalog, err = catalog.Open(ctx, catalog.Config{Journal: o.bucket, Log: cfg.log})
		return err
	}
	id, err := cfg.dir.id()
	if err != nil {
		return err
	}
	o.self = writer.New(id)
	waiting := cfg.waiting
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if cfg.background {
		// Who has started this server waits for it.
		waiting = func(who string) {
			time.AfterFunc(writer.After+2*writer.Every, func() { // does nothing once this has returned
				cancel(fmt.Errorf("data folder %s: %s writes its store: give --store with the URL of a node of it", cfg.dir, who))
			})
		}
	}
	o.catalog, err = writer.Await(ctx, writer.StandbyConfig{
		Bucket: o.bucket, Journal: o.bucket, Self: o.self,
		// A background server starts for every command, and would leave an entry each time.
		Lazy: cfg.background, After: cfg.takeover, Log: cfg.log, Waiting: waiting, Clock: time.Now,
	})
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return err
	}
	if s, ok := o.bucket.(interface{ Sweep() error }); ok {
		if err := s.Sweep(); err != nil { // of what nobody writes yet
			return err
		}
	}
	o.mark = o.startMark(cfg.log)
	return nil
}

// mark keeps the writer's mark, from when the store is this process's: to open it may
// take longer than others wait for a writer that gives no sign of life.
type mark struct {
	keeper *writer.Keeper
	cancel context.CancelFunc
	done   chan struct{} // closed when err is set
	err    error
}

func (o *owner) startMark(log *slog.Logger) *mark {
	ctx, cancel := context.WithCancel(context.Background())
	m := &mark{
		keeper: writer.NewKeeper(writer.KeeperConfig{Bucket: o.bucket, Catalog: o.catalog, Self: o.self, Log: log}),
		cancel: cancel, done: make(chan struct{}),
	}
	go func() { // ends with stop, which waits for it
		defer close(m.done)
		m.err = m.keeper.Run(ctx)
	}()
	return m
}

// stop ends the renewals.
func (m *mark) stop() {
	m.cancel()
	<-m.done
}

// id returns what tells this data folder from others, also from copies of it: while
// its lock is held no other process has it.
func (d dataDir) id() (string, error) {
	raw, err := folder.ReadBounded(d.idFile(), maxOwnFile)
	if errors.Is(err, fs.ErrNotExist) {
		raw = []byte(rand.Text() + "\n")
		err = durable.WriteFile(d.idFile(), raw, 0o600)
	}
	if err != nil {
		return "", d.wrap(err)
	}
	info, err := os.Stat(d.lock())
	if err != nil {
		return "", d.wrap(err)
	}
	host, err := os.Hostname()
	if err != nil {
		return "", err
	}
	inode := uint64(0)
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		inode = st.Ino
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%d", strings.TrimSpace(string(raw)), host, inode))
	return hex.EncodeToString(sum[:folderIDSize]), nil
}

// keepMark says where the writer listens and waits until ctx ends. When another writer
// has taken the store over it says so, lets reads go on for a moment, and returns the
// error that ends the process.
func (o *owner) keepMark(ctx context.Context, url string) error {
	if o.follower != nil {
		o.follower.Run(ctx)
		return nil
	}
	o.mark.keeper.At(url)
	select {
	case <-ctx.Done():
		return nil
	case <-o.mark.done:
	}
	o.log.ErrorContext(ctx, "fenced: no write is acknowledged any more, reads go on for a moment", "error", o.mark.err, "for", fencedTime)
	select {
	case <-ctx.Done():
	case <-time.After(fencedTime):
	}
	return fmt.Errorf("data folder %s: %w", o.dir, o.mark.err)
}

// release tells who stands by that this process writes no more, once that is so.
func (o *owner) release(ctx context.Context) {
	if o.mark == nil {
		return
	}
	o.upkeep.close()
	o.mark.stop()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
	defer cancel()
	if err := o.mark.keeper.Release(ctx); err != nil && !errors.Is(err, catalog.ErrFenced) {
		o.log.WarnContext(ctx, "the store was not released: who stands by waits until the mark has stood still", "error", err)
	}
}

// readOnly is what a node that only reads answers to a request that writes.
func (o *owner) readOnly(ctx context.Context) error {
	m, err := writer.Read(ctx, o.bucket)
	if err != nil {
		e := o.catalog.Epoch()
		if e.N == 0 {
			return api.ReadOnlyError("")
		}
		m = writer.Mark{Host: e.Host, PID: e.PID}
	}
	return api.ReadOnlyError(m.String())
}

// pending is job on a node that only reads: what was pushed is the writer's to convert.
func (o *owner) pending(ctx context.Context, _ image.Ref, source chunk.Digest, _ image.Platform) error {
	ok, err := o.registry.Has(ctx, digest.Digest(source.String()))
	if err != nil || !ok {
		return err
	}
	return fmt.Errorf("%w: %s was pushed and is not converted", api.ErrPending, source)
}

// ready returns why the node should get no requests now.
func (o *owner) ready(context.Context) error {
	if o.follower != nil {
		return o.follower.Ready()
	}
	select {
	case <-o.catalog.Fenced():
		return catalog.ErrFenced
	default:
		return nil
	}
}

func (o *owner) lag() api.Lag {
	l := o.follower.Lag()
	return api.Lag{Applied: l.Applied, Entries: l.Entries, Seconds: l.Seconds, Error: l.Error}
}

// nodes makes the configs of handlers those of a node that only reads, when it is one.
func (o *owner) nodes(cfg *api.Config, v2 *front.Config) {
	cfg.Ready = o.ready
	cfg.Registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "quarry_catalog_epoch", Help: "Writers that the store has had, by its journal.",
	}, func() float64 { return float64(o.catalog.Epoch().N) }))
	if o.follower == nil {
		return
	}
	cfg.ReadOnly, cfg.Lag, v2.ReadOnly = o.readOnly, o.lag, o.readOnly
	cfg.Job, cfg.Jobs = o.pending, nil
	cfg.Registry.MustRegister(o.follower.Collectors()...)
}

// chooseReadOnly says whether the data folder is of a node that only reads. The folder
// remembers that: a command that starts a server of it must not make it another writer
// of the same bucket.
func (d dataDir) chooseReadOnly(asked, background bool) (bool, error) {
	_, err := os.Stat(d.readOnlyFile())
	is := err == nil
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return false, d.wrap(err)
	case is && !asked && !background:
		return false, fmt.Errorf("data folder %s is of a node that only reads: give --read-only, or remove %s to let it write", d, d.readOnlyFile())
	}
	return is || asked, nil
}

// rememberReadOnly is for a folder whose lock is held.
func (d dataDir) rememberReadOnly() error {
	return d.wrap(durable.WriteFile(d.readOnlyFile(), nil, 0o600))
}

// chooseNoSign says whether a node signs nothing. The folder remembers it as soon as
// somebody has said so: a background server that a command starts must not make a key
// there and sign with it. The lock is held.
func (d dataDir) chooseNoSign(asked, background bool) (bool, error) {
	_, err := os.Stat(d.noSignFile())
	is := err == nil
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return false, err
	case is && !asked && !background:
		return false, fmt.Errorf("it is of a node that signs nothing: give --no-sign, or remove %s to let it sign with a key of its own", d.noSignFile())
	case asked && !is:
		return true, durable.WriteFile(d.noSignFile(), nil, 0o600)
	}
	return is, nil
}

// noStore explains a bucket that a node that only reads finds empty.
func noStore(err error) error {
	if errors.Is(err, bucket.ErrNotFound) {
		return fmt.Errorf("%w: nobody has made a store in this bucket; quarry serve without --read-only makes one", err)
	}
	return err
}
