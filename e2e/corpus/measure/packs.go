package measure

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// laidPack is where chunks are in a pack and how long it is.
type laidPack struct {
	entries []pack.Entry
	size    int64
}

// packFixed is what a pack has beside its chunks: header, tag of the footer,
// trailer. A test compares it with a real pack.
const packFixed = pack.HeaderSize + 4 + pack.TrailerSize

// layPacks places chunks in packs as the store does: a pack is closed when its
// records reach the target.
func layPacks(entries []pack.Entry) []laidPack {
	var packs []laidPack
	var p laidPack
	off := int64(pack.HeaderSize)
	end := func() {
		if len(p.entries) > 0 {
			p.size = off + packFixed - pack.HeaderSize + int64(len(p.entries))*pack.EntrySize
			packs = append(packs, p)
		}
		p, off = laidPack{}, pack.HeaderSize
	}
	for _, e := range entries {
		e.Off = off + pack.RecordHeaderSize
		off = e.Off + int64(e.Stored)
		p.entries = append(p.entries, e)
		if off >= pack.TargetSize || len(p.entries) == pack.MaxCount {
			end()
		}
	}
	end()
	return packs
}

// indexBytes fills a chunk index in an empty folder and returns how large the
// folder is when it has been opened again, which moves the log into tables.
func indexBytes(ctx context.Context, dir string, packs []laidPack) (int64, error) {
	x, err := chunkindex.Open(chunkindex.Config{Dir: dir})
	if err != nil {
		return 0, err
	}
	for i, p := range packs {
		id := chunk.Sum(binary.LittleEndian.AppendUint64(nil, uint64(i)))
		if err := x.InsertBatch(ctx, id, p.entries); err != nil {
			return 0, errors.Join(err, x.Close())
		}
	}
	if err := x.Close(); err != nil {
		return 0, err
	}
	if x, err = chunkindex.Open(chunkindex.Config{Dir: dir}); err != nil {
		return 0, err
	}
	if err := x.Close(); err != nil {
		return 0, err
	}
	var size int64
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		fi, err := d.Info()
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err == nil {
			size += fi.Size()
		}
		return err
	})
	return size, err
}
