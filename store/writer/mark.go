// Package writer keeps one process at a time writing a bucket. The writer renews a
// small object, its mark; whoever stands by takes the store over when the mark has
// not changed for a while, by beginning the journal's next epoch, which is what
// really ends the writer before.
package writer

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"time"
	"unicode/utf8"

	"quarry/internal/strictjson"
	"quarry/store/bucket"
	"quarry/store/catalog"
)

const (
	// Key is the key of the mark. It is the one object beside the journal whose
	// content changes.
	Key         = "run/writer"
	markVersion = 1
	maxMark     = 4 << 10 // a mark has some 300 bytes
	// MaxURL bounds the address in a mark.
	MaxURL = 1024

	// Every is how often a writer renews its mark.
	Every = 2 * time.Second
	// After is how long a mark must stand still before somebody takes over: ten
	// renewals, so that one which is slow, or lost, is none that is missing.
	After = 20 * time.Second
	// markTime bounds one look at the mark, or one renewal.
	markTime = 10 * time.Second
)

// Mark is what a writer says of itself. It decides nothing but when others try to
// take over; who may write is decided by the journal.
type Mark struct {
	Version  int    `json:"version"`
	Epoch    uint64 `json:"epoch"`  // of the journal, as the writer knows it
	Writer   string `json:"writer"` // id of the process
	Folder   string `json:"folder"` // id of its data folder
	Host     string `json:"host"`   // for people
	PID      int    `json:"pid"`    // for people
	URL      string `json:"url"`    // where it listens, "" when on a socket only
	Count    uint64 `json:"count"`  // of renewals
	Released bool   `json:"released"`
}

// String names the writer.
func (m Mark) String() string {
	s := fmt.Sprintf("pid %d on %s", m.PID, m.Host)
	if m.URL != "" {
		s += " (" + m.URL + ")"
	}
	return s
}

// Encode returns the bytes of the mark.
func (m Mark) Encode() ([]byte, error) {
	if err := m.validate(); err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// Decode reads a mark, in the one form that Encode gives it.
func Decode(b []byte) (Mark, error) {
	m, err := strictjson.Decode[Mark](b, maxMark)
	if err == nil {
		err = m.validate()
	}
	if err != nil {
		return Mark{}, fmt.Errorf("%s: %w", Key, err)
	}
	return m, nil
}

func (m Mark) validate() error {
	switch {
	case m.Version != markVersion:
		return fmt.Errorf("the mark has version %d, this quarry knows %d", m.Version, markVersion)
	case len(m.URL) > MaxURL || !utf8.ValidString(m.URL):
		return fmt.Errorf("the URL %.32q has %d bytes, at most %d of UTF-8 are allowed", m.URL, len(m.URL), MaxURL)
	}
	// The rest is as in the journal, which is how the writer is told from others.
	return catalog.Epoch{N: max(m.Epoch, 1), Writer: m.Writer, Folder: m.Folder, Host: m.Host, PID: m.PID, Time: time.Unix(0, 0).UTC()}.Validate()
}

// New returns a writer of this process, which has that data folder.
func New(folder string) catalog.Writer {
	host, err := os.Hostname()
	if err != nil || host == "" || !utf8.ValidString(host) {
		host = "unknown"
	}
	return catalog.Writer{ID: newID(), Folder: folder, Host: host[:min(len(host), catalog.MaxHost)], PID: os.Getpid()}
}

func newID() string {
	id := make([]byte, 16)
	rand.Read(id)
	return hex.EncodeToString(id)
}

// Read returns the mark of a bucket: bucket.ErrNotFound when there is none.
func Read(ctx context.Context, b bucket.Bucket) (Mark, error) {
	raw, err := readRaw(ctx, b)
	if err != nil {
		return Mark{}, err
	}
	return Decode(raw)
}

func readRaw(ctx context.Context, b bucket.Bucket) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, markTime)
	defer cancel()
	return bucket.ReadReplaced(ctx, b, Key, maxMark)
}

func put(ctx context.Context, b bucket.Bucket, raw []byte) error {
	ctx, cancel := context.WithTimeout(ctx, markTime)
	defer cancel()
	return b.Put(ctx, Key, bytes.NewReader(raw), int64(len(raw)))
}

// isAway tells that the bucket gave no answer from one that the mark is not there, or
// no mark.
func isAway(err error) bool { return err != nil && !bucket.IsDamage(err) }
