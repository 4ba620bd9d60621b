package client_test

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store/chunk"
	"quarry/store/mem"
	"quarry/store/pack"
	"quarry/store/packed"
	"quarry/store/storetest"
)

func TestClientOfAPackedStoreIsAStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		w := apitest.New(t)
		srv, _ := w.Serve(t, nil)
		c := connect(t, client.Config{URL: srv.URL})
		return storetest.Harness{
			Getter: c, BatchGetter: c,
			Plant:  func(t *testing.T, p []byte) { w.PutChunk(t, p) },
			Damage: func(t *testing.T, d chunk.Digest) { w.Damage(t, d) },
		}
	})
}

func TestClientOfAMemoryStoreIsAStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		s := mem.New()
		srv := httptest.NewServer(api.NewHandler(api.Config{Chunks: served{s}}))
		t.Cleanup(srv.Close)
		c := connect(t, client.Config{URL: srv.URL})
		return storetest.Harness{
			Getter: c, BatchGetter: c,
			Plant:  func(_ *testing.T, p []byte) { s.Plant(chunk.Sum(p), p) },
			Damage: func(_ *testing.T, d chunk.Digest) { s.Plant(d, []byte("damaged")) },
		}
	})
}

func TestStoresAreAStore(t *testing.T) {
	// How often the same content is served, and by how many nodes that are gone.
	for name, n := range map[string]struct{ stores, gone int }{
		"one": {1, 0}, "two": {2, 0}, "the second, as the first is gone": {1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) storetest.Harness {
				var worlds []*apitest.World
				var clients []*client.Client
				for range n.gone {
					clients = append(clients, gone(t))
				}
				for range n.stores {
					w := apitest.New(t)
					srv, _ := w.Serve(t, nil)
					worlds = append(worlds, w)
					clients = append(clients, connect(t, client.Config{URL: srv.URL}))
				}
				s := client.NewStores(client.StoresConfig{Clients: clients, Backoff: time.Millisecond})
				return storetest.Harness{
					Getter: s, BatchGetter: s,
					Plant: func(t *testing.T, p []byte) {
						for _, w := range worlds {
							w.PutChunk(t, p)
						}
					},
					Damage: func(t *testing.T, d chunk.Digest) {
						for _, w := range worlds {
							w.Damage(t, d)
						}
					},
				}
			})
		})
	}
}

// gone returns a client of a server that is no more.
func gone(t *testing.T) *client.Client {
	t.Helper()
	srv := httptest.NewServer(nil)
	srv.Close()
	return connect(t, client.Config{URL: srv.URL})
}

// served gives a memory store the stored form of its chunks.
type served struct{ *mem.Store }

func (s served) StoredBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, packed.Stored, error) error) error {
	return s.GetBatch(ctx, ds, func(d chunk.Digest, p []byte, err error) error {
		if err != nil {
			return fn(d, packed.Stored{}, err)
		}
		codec, stored := pack.Compress(nil, p)
		return fn(d, packed.Stored{Codec: codec, Len: uint32(len(p)), CRC: pack.Checksum(stored), Bytes: stored}, nil)
	})
}
