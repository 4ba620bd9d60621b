// Package indextest fills chunk indexes with made-up chunks, any number of them
// and always the same, for measurements of an index of realistic size.
package indextest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

const (
	// packChunks are the chunks of one pack: at some 6 KiB compressed, the mean
	// of images of small files, 64 MiB.
	packChunks = 10_000
	// packIDs is where the digests of packs begin, out of the way of chunks.
	packIDs = 1 << 62
	// kept is the name of a kept index: its keys and the version of its schema.
	kept = "%d-keys-2"
	// complete is the file that says that a kept index was filled to its end.
	complete = "complete"
)

// Digest returns the digest of made-up chunk n.
func Digest(n uint64) chunk.Digest { return chunk.Sum(binary.BigEndian.AppendUint64(nil, n)) }

// Pack returns a made-up pack of count chunks, number first and those after it.
func Pack(first uint64, count int) (chunk.Digest, []pack.Entry) {
	entries := make([]pack.Entry, count)
	off := int64(pack.HeaderSize + pack.RecordHeaderSize)
	for i := range entries {
		d := Digest(first + uint64(i))
		// Digests are random, so parts of them are good for lengths and checksums.
		length := 2 + binary.BigEndian.Uint32(d[8:])%(32<<10)
		stored := 1 + binary.BigEndian.Uint32(d[12:])%(length-1)
		entries[i] = pack.Entry{Digest: d, Off: off, Stored: stored, Len: length, Codec: pack.Zstd, CRC: binary.BigEndian.Uint32(d[16:])}
		off += int64(stored) + pack.RecordHeaderSize
	}
	return Digest(packIDs + first), entries
}

// Fill makes an index in dir of the chunks 0 to keys-1.
func Fill(ctx context.Context, dir string, keys uint64) (err error) {
	ix, err := chunkindex.Open(chunkindex.Config{Dir: dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ix.Close()) }()
	for first := uint64(0); first < keys; first += packChunks {
		id, entries := Pack(first, int(min(packChunks, keys-first)))
		if err := ix.InsertBatch(ctx, id, entries); err != nil {
			return err
		}
	}
	return nil
}

// Kept returns the folder of an index that Fill made below dir, now or in an
// earlier run, and whether it was now.
func Kept(ctx context.Context, dir string, keys uint64) (index string, made bool, err error) {
	dir = filepath.Join(dir, fmt.Sprintf(kept, keys))
	index = filepath.Join(dir, "index")
	if _, err := os.Stat(filepath.Join(dir, complete)); err == nil {
		return index, false, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", false, err
	}
	if err := Fill(ctx, index, keys); err != nil {
		return "", false, err
	}
	return index, true, os.WriteFile(filepath.Join(dir, complete), nil, 0o644)
}
