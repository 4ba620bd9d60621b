package names_test

import (
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/signer"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/names"
)

func newCatalog(t *testing.T) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: mem.New()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestANameIsSignedAsItIsStored(t *testing.T) {
	key, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	c := newCatalog(t)
	cfg := names.Config{Catalog: c, Key: key, Now: func() time.Time { return now }}
	for serial := uint64(1); serial <= 2; serial++ {
		source := chunk.Sum([]byte{byte(serial)})
		if err := cfg.Set(t.Context(), "a/b", "v1", source); err != nil {
			t.Fatal(err)
		}
		n, ok := c.Name("a/b", "v1")
		if !ok || n.Source != source || n.Serial != serial {
			t.Fatalf("the catalog has %+v, want source %s with serial %d", n, source, serial)
		}
		payload, _, err := signer.Open(n.Statement, image.NameStatementType, signer.NewTrust(key.Public()))
		if err != nil {
			t.Fatal(err)
		}
		s, err := image.DecodeNameStatement(payload)
		if err != nil {
			t.Fatal(err)
		}
		want := image.NameStatement{Repo: "a/b", Tag: "v1", Source: source, Serial: serial, Issued: now.Truncate(time.Second)}
		if s != want {
			t.Errorf("statement: got %+v, want %+v", s, want)
		}
	}
}

func TestWithoutAKeyANameIsUnsigned(t *testing.T) {
	c := newCatalog(t)
	if err := (names.Config{Catalog: c}).Set(t.Context(), "a", "v1", chunk.Sum(nil)); err != nil {
		t.Fatal(err)
	}
	if n, _ := c.Name("a", "v1"); n.Statement != nil {
		t.Errorf("statement: got %s, want none", n.Statement)
	}
}

func TestManyMoveOneNameAtOnce(t *testing.T) {
	c := newCatalog(t)
	var g errgroup.Group
	const movers = 8
	for i := range movers {
		g.Go(func() error {
			return names.Config{Catalog: c}.Set(t.Context(), "a", "v1", chunk.Sum([]byte{byte(i)}))
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if n, _ := c.Name("a", "v1"); n.Serial != movers {
		t.Errorf("serial: got %d, want %d", n.Serial, movers)
	}
}
