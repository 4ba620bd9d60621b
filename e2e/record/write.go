package main

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"

	"quarry/rafs"
)

// writeReads writes a line for every read: the chunk in which it begins, the
// block of that chunk, and its length in blocks.
func writeReads(name, command string, im *rafs.Image, reads []read) error {
	chunks := im.Blob.Chunks
	var b strings.Builder
	for _, r := range reads {
		i := sort.Search(len(chunks), func(i int) bool { return chunks[i].DevOff > r.off }) - 1
		fmt.Fprintf(&b, "%d %d %d\n", i, (r.off-chunks[i].DevOff)/blockSize, r.length/blockSize)
	}
	fmt.Fprintf(os.Stderr, "%s: %d reads\n", command, len(reads))
	return writeFile(name, b.String())
}

func writeFile(name, content string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(z, content); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return f.Close()
}
