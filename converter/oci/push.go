package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"quarry/store/chunk"
	"quarry/store/image"
)

// PushConfig says where an image is pushed to.
type PushConfig struct {
	Host        string // HOST[:PORT] of the registry
	Plain       bool   // it speaks http, not https
	Repo, Tag   string
	Transport   http.RoundTripper
	Credentials Credentials // for it

	Source Config // how the source is opened
	// Progress is told how many bytes of the blobs and manifests are there, of all
	// known so far. It is called by one goroutine. nil = nobody asks.
	Progress func(done, total int64)
}

// pushJobs is how many blobs go at once.
const pushJobs = 4

// pushRetries says how often a request that may succeed later is made: 5 times in
// half a minute.
var pushRetries = remote.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Steps: 5}

// Push copies the image or image index that src names, in one of Forms, to a
// registry, without the blobs that are there already, and returns its digest. The
// manifests are always sent, so that the registry does again what follows on a push.
func Push(ctx context.Context, src string, cfg PushConfig) (chunk.Digest, error) {
	var none chunk.Digest
	if err := CheckSource(src); err != nil {
		return none, err
	}
	opts := []name.Option{}
	if cfg.Plain {
		opts = append(opts, name.Insecure)
	}
	ref, err := name.NewTag(cfg.Host+"/"+cfg.Repo+":"+cfg.Tag, opts...)
	if err != nil {
		return none, err
	}
	scheme, rest, _ := strings.Cut(src, ":")
	b, err := schemes[scheme](ctx, rest, cfg.Source.withDefaults())
	if err != nil {
		return none, fmt.Errorf("source %s: %w", src, err)
	}
	defer b.Close() // it was only read
	top, err := b.top(ctx)
	var what *pushable
	if err == nil {
		what, err = openPushable(ctx, b, top)
	}
	if err != nil {
		return none, fmt.Errorf("source %s: %w", src, err)
	}
	if err := what.write(ctx, ref, cfg); err != nil {
		return none, err
	}
	return chunk.Sum(what.raw), nil
}

// pushable is a manifest or image index of a source, as go-containerregistry
// wants it.
type pushable struct {
	ctx   context.Context // go-containerregistry's interfaces have no place for it
	blobs blobs
	raw   []byte
	doc   *document
	desc  descriptor
}

var _ partial.CompressedImageCore = (*pushable)(nil)

func openPushable(ctx context.Context, b blobs, d descriptor) (*pushable, error) {
	raw, err := readVerified(ctx, b, kindManifest, d, MaxManifest)
	if err != nil {
		return nil, fmt.Errorf("manifest %s: %w", d.Digest, err)
	}
	doc, err := parseDocument(raw, d.MediaType)
	if err != nil {
		return nil, fmt.Errorf("manifest %s: %w", d.Digest, err)
	}
	return &pushable{ctx: ctx, blobs: b, raw: raw, doc: doc, desc: d}, nil
}

func (p *pushable) write(ctx context.Context, ref name.Reference, cfg PushConfig) (err error) {
	updates, told := make(chan v1.Update, 16), make(chan struct{})
	go func() { // ends when the writing closes updates
		defer close(told)
		for u := range updates {
			if cfg.Progress != nil && u.Error == nil {
				cfg.Progress(u.Complete, u.Total)
			}
		}
	}()
	transport := &pushTransport{scheme: schemeOf(cfg.Plain), RoundTripper: cfg.Transport}
	defer transport.cancel(ctx)
	opts := []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(transport), remote.WithAuth(cfg.Credentials.authenticator()),
		remote.WithJobs(pushJobs), remote.WithProgress(updates), remote.WithUserAgent("quarry"), remote.WithRetryBackoff(pushRetries),
		remote.WithRetryStatusCodes(http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError,
			http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout),
		remote.WithNondistributable,
	}
	if p.doc.isIndex() {
		err = remote.WriteIndex(ref, pushIndex{p}, opts...)
	} else {
		var im v1.Image
		if im, err = partial.CompressedToImage(p); err == nil {
			err = remote.Write(ref, im, opts...)
		} else {
			close(updates)
		}
	}
	<-told
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// RawManifest implements partial.CompressedImageCore.
func (p *pushable) RawManifest() ([]byte, error) { return p.raw, nil }

// MediaType implements partial.CompressedImageCore.
func (p *pushable) MediaType() (types.MediaType, error) {
	switch {
	case p.doc.MediaType != "":
		return p.doc.MediaType, nil
	case p.desc.MediaType != "":
		return p.desc.MediaType, nil
	case p.doc.isIndex():
		return types.OCIImageIndex, nil
	}
	return types.OCIManifestSchema1, nil
}

// RawConfigFile implements partial.CompressedImageCore.
func (p *pushable) RawConfigFile() ([]byte, error) {
	return readVerified(p.ctx, p.blobs, kindBlob, *p.doc.Config, image.MaxConfig)
}

// LayerByDigest implements partial.CompressedImageCore.
func (p *pushable) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, d := range p.doc.Layers {
		if d.Digest == h {
			return &pushLayer{p, d}, nil
		}
	}
	return nil, fmt.Errorf("the manifest has no layer %s", h)
}

// pushLayer is a layer of a pushable. The registry verifies its bytes.
type pushLayer struct {
	*pushable
	layer descriptor
}

// Digest implements partial.CompressedLayer.
func (l *pushLayer) Digest() (v1.Hash, error) { return l.layer.Digest, nil }

// Size implements partial.CompressedLayer.
func (l *pushLayer) Size() (int64, error) { return l.layer.Size, nil }

// MediaType implements partial.CompressedLayer.
func (l *pushLayer) MediaType() (types.MediaType, error) { return l.layer.MediaType, nil }

// Compressed implements partial.CompressedLayer.
func (l *pushLayer) Compressed() (io.ReadCloser, error) {
	d, err := digestOf(l.layer)
	if err != nil {
		return nil, err
	}
	r, size, err := l.blobs.open(l.ctx, kindBlob, d)
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", d, err)
	}
	if size >= 0 && size != l.layer.Size {
		return nil, errors.Join(fmt.Errorf("layer %s: blob has %d bytes, its descriptor says %d", d, size, l.layer.Size), r.Close())
	}
	return r, nil
}

// pushIndex is a pushable that is an image index.
type pushIndex struct{ *pushable }

var _ v1.ImageIndex = pushIndex{}

// Digest implements v1.ImageIndex.
func (x pushIndex) Digest() (v1.Hash, error) { return hash(chunk.Sum(x.raw)), nil }

// Size implements v1.ImageIndex.
func (x pushIndex) Size() (int64, error) { return int64(len(x.raw)), nil }

// IndexManifest implements v1.ImageIndex.
func (x pushIndex) IndexManifest() (*v1.IndexManifest, error) {
	var m v1.IndexManifest
	if err := json.NewDecoder(bytes.NewReader(x.raw)).Decode(&m); err != nil {
		return nil, fmt.Errorf("image index %s: %w", x.desc.Digest, err)
	}
	return &m, nil
}

func (x pushIndex) child(h v1.Hash) (*pushable, error) {
	for _, d := range x.doc.Manifests {
		if d.Digest == h {
			return openPushable(x.ctx, x.blobs, d)
		}
	}
	return nil, fmt.Errorf("the image index has no manifest %s", h)
}

// Image implements v1.ImageIndex.
func (x pushIndex) Image(h v1.Hash) (v1.Image, error) {
	p, err := x.child(h)
	if err != nil {
		return nil, err
	}
	return partial.CompressedToImage(p)
}

// ImageIndex implements v1.ImageIndex.
func (x pushIndex) ImageIndex(h v1.Hash) (v1.ImageIndex, error) {
	p, err := x.child(h)
	if err != nil {
		return nil, err
	}
	return pushIndex{p}, nil
}
