package oci_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/image"
)

// The names of an archive's members are held in memory, and each may be 1 MiB.
func TestAnArchiveOfLongNamesIsRefused(t *testing.T) {
	const long = 1<<20 - 1024 // archive/tar reads headers of 1 MiB
	link := testimage.Symlink("l", strings.Repeat("x", long/2))
	link.Name = strings.Repeat("n", long/2)
	member := testimage.RawTar(link)
	f := filepath.Join(t.TempDir(), "names.tar")
	file, err := os.Create(f)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriter(file)
	for range 256<<20/long + 1 {
		w.Write(member)
	}
	if err := w.Flush(); err != nil || file.Close() != nil {
		t.Fatal(err)
	}
	openError(t, "oci-archive:"+f, image.Platform{}, f, "names and link targets", "268435456 bytes")
}

// asked counts how often somebody looks whether the context has ended, which
// whoever reads a layer does at every read.
type asked struct {
	context.Context
	times *atomic.Int64
}

func (a asked) Err() error { a.times.Add(1); return a.Context.Err() }

// A member that stands for many layers is decompressed for its length once,
// whatever diffIDs it is claimed to have.
func TestACompressedMemberIsMeasuredOnce(t *testing.T) {
	blob := testimage.Gzip(t, make([]byte, 4<<20))
	reads := func(layers int) int64 {
		var ids, names []string
		for i := range layers {
			ids = append(ids, testimage.Digest(fmt.Append(nil, i)))
			names = append(names, []string{"1.tar.gz", "./1.tar.gz", "link"}[i%3])
		}
		conf, err := json.Marshal(map[string]any{"os": "linux", "architecture": "amd64", "rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
		if err != nil {
			t.Fatal(err)
		}
		f := savedTar(t, testimage.File("c.json", string(conf)), testimage.File("1.tar.gz", string(blob)), testimage.Symlink("link", "1.tar.gz"),
			manifestJSON(t, savedImage{Config: "c.json", Layers: names}))
		ctx := asked{t.Context(), new(atomic.Int64)}
		im, err := oci.Open(ctx, "docker-archive:"+f, oci.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer im.Close()
		if len(im.Layers) != layers || im.Layers[layers-1].Size != 4<<20 {
			t.Fatalf("%d layers, the last of %d bytes", len(im.Layers), im.Layers[len(im.Layers)-1].Size)
		}
		return ctx.times.Load()
	}
	if one, many := reads(1), reads(300); one < 100 || many > 2*one {
		t.Errorf("%d reads for one layer, %d for 300", one, many)
	}
}

// What an archive expands to is bounded as what a layer expands to, and is told
// while it does.
func TestTheSpoolOfACompressedArchiveIsBoundedAndTold(t *testing.T) {
	const size = 130 << 20
	f := filepath.Join(t.TempDir(), "x.tar.zst")
	blob := testimage.Zstd(t, make([]byte, size))
	write(t, f, blob)
	type told struct{ read, size, plain int64 }
	var all []told
	cfg := oci.Config{TmpDir: t.TempDir(), Spooled: func(read, size, plain int64) { all = append(all, told{read, size, plain}) }}
	_, err := oci.Open(t.Context(), "oci-archive:"+f, cfg)
	wantErr(t, err, "it has no oci-layout")
	if len(all) != 2 || all[1].plain < 128<<20 || all[0].read == 0 || all[1].size != int64(len(blob)) {
		t.Errorf("told of %d bytes in %d: %v", size, len(blob), all)
	}
	cfg.Limits = layer.Limits{RatioFloor: 32 << 20}
	all = nil
	_, err = oci.Open(t.Context(), "oci-archive:"+f, cfg)
	wantErr(t, err, "decompress the archive", "limit MaxRatio")
	if len(all) > 0 {
		t.Errorf("it went on: %v", all)
	}
}
