package packed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"quarry/store/bucket"
	"quarry/store/chunk"
)

const (
	// MetaKey is the key of the object that Meta is.
	MetaKey     = "store.json"
	metaVersion = 1
	maxMeta     = 4 << 10 // the object has some hundred bytes
)

// ErrMeta says that the object store.json is damaged. Without it a store has the
// same packs and images: CreateMeta, with the chunk size it had, makes it anew.
var ErrMeta = errors.New(MetaKey + " is damaged")

// Meta is what is fixed for the life of a store, the object store.json.
type Meta struct {
	Version   int       `json:"version"`
	ChunkSize int64     `json:"chunk_size"`
	Created   time.Time `json:"created"`
}

// CreateMeta makes a bucket a store. It refuses one that is a store already.
func CreateMeta(ctx context.Context, b bucket.Bucket, chunkSize int64, now time.Time) (Meta, error) {
	if !chunk.ValidSize(chunkSize) {
		return Meta{}, fmt.Errorf("chunk size %d is not a power of two from %d to %d", chunkSize, chunk.MinSize, chunk.MaxSize)
	}
	switch _, err := b.Stat(ctx, MetaKey); {
	case err == nil:
		return Meta{}, fmt.Errorf("%s exists: this is a store already", MetaKey)
	case !errors.Is(err, bucket.ErrNotFound):
		return Meta{}, fmt.Errorf("create store: %w", err) // there may be one
	}
	m := Meta{Version: metaVersion, ChunkSize: chunkSize, Created: now.UTC().Truncate(time.Second)}
	p, err := json.Marshal(m)
	if err != nil {
		return Meta{}, fmt.Errorf("encode %s: %w", MetaKey, err)
	}
	if err := b.Put(ctx, MetaKey, bytes.NewReader(p), int64(len(p))); err != nil {
		return Meta{}, fmt.Errorf("create store: %w", err)
	}
	return m, nil
}

// OpenMeta reads what a store is. The error is bucket.ErrNotFound for a bucket
// that is none, and ErrMeta for one whose object is damaged.
func OpenMeta(ctx context.Context, b bucket.Bucket) (Meta, error) {
	p, err := bucket.ReadObject(ctx, b, MetaKey, maxMeta)
	if bucket.IsDamage(err) && !errors.Is(err, bucket.ErrNotFound) {
		err = fmt.Errorf("%w: %w", ErrMeta, err)
	}
	if err != nil {
		return Meta{}, fmt.Errorf("open store: %w", err)
	}
	return decodeMeta(p)
}

func decodeMeta(p []byte) (Meta, error) {
	// The version comes first and alone: fields of a later one are not known here.
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(p, &v); err != nil {
		return Meta{}, fmt.Errorf("%w: %w", ErrMeta, err)
	}
	if v.Version != metaVersion {
		return Meta{}, fmt.Errorf("%s has version %d, this program knows %d: use the quarry that wrote it", MetaKey, v.Version, metaVersion)
	}
	dec := json.NewDecoder(bytes.NewReader(p))
	dec.DisallowUnknownFields()
	var m Meta
	if err := dec.Decode(&m); err != nil {
		return Meta{}, fmt.Errorf("%w: %w", ErrMeta, err)
	}
	if again, err := json.Marshal(m); err != nil || !bytes.Equal(again, p) {
		return Meta{}, fmt.Errorf("%w: it is not in the form it was written in", ErrMeta)
	}
	if !chunk.ValidSize(m.ChunkSize) {
		return Meta{}, fmt.Errorf("%w: chunk size %d is not a power of two from %d to %d", ErrMeta, m.ChunkSize, chunk.MinSize, chunk.MaxSize)
	}
	return m, nil
}
