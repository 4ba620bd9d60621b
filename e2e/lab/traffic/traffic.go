// Package traffic reads what passed between a worker and a store: which chunks
// came, and how many bytes they were. It counts independently of both.
package traffic

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"quarry/api"
	"quarry/e2e/lab/proxy"
	"quarry/store/chunk"
	"quarry/store/trace"
)

// hintsMagic begins what follows the parts of a start stream; see
// store/trace/FORMAT.md.
const hintsMagic = "QRYHINTS"

// Chunk is one chunk that came.
type Chunk struct {
	Digest chunk.Digest // zero for one that came with the start of its image
	Number uint32       // of such a one, in the image's chunk table
	Stored int64        // length as it came
	Plain  int64        // length as the file has it
}

// Chunks returns the chunks that came in an exchange. What was cut off counts as
// far as it came.
func Chunks(e proxy.Exchange) (chunks []Chunk, err error) {
	switch {
	case e.Status != http.StatusOK:
	case strings.HasPrefix(e.Path, "/v1/start/"):
		chunks, err = started(e.Answer)
	case strings.HasSuffix(e.Path, ":batchGet"):
		chunks, err = Batch(e.Answer)
	}
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("%s %s: %w", e.Method, e.Path, err)
	}
	return chunks, nil
}

// IsRecord reports whether an exchange sends the record of a run, which is no part
// of the run.
func IsRecord(e proxy.Exchange) bool { return strings.HasSuffix(e.Path, "/trace") }

// Batch returns the chunks of a batchGet answer.
func Batch(answer []byte) (chunks []Chunk, err error) {
	frames := api.NewFrameReader(bytes.NewReader(answer), api.MaxBatch)
	for {
		f, err := frames.Next()
		if errors.Is(err, io.EOF) {
			return chunks, nil
		}
		if err != nil {
			return chunks, err
		}
		if f.Status == api.StatusOK {
			chunks = append(chunks, Chunk{Digest: f.Digest, Stored: int64(len(f.Stored)), Plain: int64(f.Len)})
		}
	}
}

// started returns the chunks that came behind the parts of a start stream.
func started(answer []byte) (chunks []Chunk, err error) {
	r := bytes.NewReader(answer)
	parts := api.NewStartReader(r)
	// Where the worker has the image, its content is left out, and nothing but the
	// stream itself says so.
	for !bytes.HasPrefix(answer[len(answer)-r.Len():], []byte(hintsMagic)) {
		_, err := parts.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if _, err := io.Copy(io.Discard, parts); err != nil {
			return nil, err
		}
	}
	if r.Len() == 0 {
		return nil, nil // version 1, or cut off
	}
	stream := trace.NewReader(r)
	if _, _, err := stream.List(); err != nil {
		return nil, err
	}
	for {
		k, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return chunks, nil
		}
		if err != nil {
			return chunks, err
		}
		chunks = append(chunks, Chunk{Number: k.Number, Stored: int64(len(k.Stored)), Plain: int64(k.Len)})
	}
}
