package api

import (
	"encoding/json"
	"log/slog"
	"time"

	"quarry/store/chunk"
	"quarry/store/image"
)

// Header and media type names of the contract.
const (
	HeaderRequestID = "X-Request-Id"
	// HeaderBucketBytes is a header, or a trailer, of an answer of batchGet, see FORMAT.md.
	HeaderBucketBytes = "Quarry-Bucket-Bytes"
	// HeaderTrace of an answer to start is TraceEnough when the run that it is for need
	// not be recorded, see FORMAT.md.
	HeaderTrace = "Quarry-Trace"
	TraceEnough = "enough"

	TypeJSON    = "application/json"
	TypeNDJSON  = "application/x-ndjson"
	TypeDigests = "application/vnd.quarry.digests.v1" // request body of batchGet: 32 bytes a digest
	TypeFrames  = "application/vnd.quarry.chunks.v1"  // answer of batchGet, see FORMAT.md
	TypeFrames2 = "application/vnd.quarry.chunks.v2"  // with chunks as records of packs
	TypeStart   = "application/vnd.quarry.start.v1"   // answer of start, see FORMAT.md
	TypeStart2  = "application/vnd.quarry.start.v2"   // with what runs of the image touch first
	TypeTrace   = "application/vnd.quarry.trace.v1"   // record of a run, see store/trace/FORMAT.md
	TypeBytes   = "application/octet-stream"
)

const (
	// MaxBatch is the number of digests in one batchGet. 1024 × 32 bytes is a
	// 32 KiB request; at the default chunk size its answer is at most 256 MiB.
	MaxBatch = 1024
	// MaxNames is the number of names in one page of GET /v1/images: at 400
	// bytes a name about 400 KiB.
	MaxNames = 1000
	// MaxEvent bounds one line of an NDJSON stream.
	MaxEvent = 1 << 20
	// BootstrapWindow is the zstd window of a compressed bootstrap: it bounds what
	// a client must allocate to decompress, whatever the answer claims.
	BootstrapWindow = 4 << 20
	// MaxJSON bounds every other JSON document, requests and answers.
	MaxJSON = 4 << 20
)

// States of an image in an answer of GET /v1/images/<ref>.
const (
	StatusReady      = "ready"
	StatusPending    = "pending"    // its conversion waits for its turn
	StatusConverting = "converting" // it is under way
	StatusUnsigned   = "unsigned"
)

// Image answers GET /v1/images/<ref>. The envelopes are untrusted until
// signer.Open has verified them.
type Image struct {
	Status string          `json:"status"`
	Name   json.RawMessage `json:"name"`          // DSSE envelope of the name statement, null when asked by digest or unsigned
	Image  json.RawMessage `json:"image"`         // DSSE envelope of the image statement, null unless ready
	Job    string          `json:"job,omitempty"` // id of the conversion that makes it ready
	// Failure is there when the image was asked for by tag and the newest
	// conversion of the tag did not end well; the image is an older one then.
	Failure *image.Failure `json:"failure,omitempty"`
}

// NameInfo is one entry of the list of names.
type NameInfo struct {
	Repo   string       `json:"repo"`
	Tag    string       `json:"tag"`
	Source chunk.Digest `json:"source"`
	Serial uint64       `json:"serial"`
	Since  *time.Time   `json:"since,omitempty"` // bound to that source, to the hour; absent when nobody knows
}

// NamesPage answers GET /v1/images.
type NamesPage struct {
	Names []NameInfo `json:"names"`
	Next  string     `json:"next,omitempty"` // value of ?after= for the next page, "" on the last
}

// batchRequest is the JSON form of a batchGet request body.
type batchRequest struct {
	Digests []chunk.Digest `json:"digests"`
}

// ConvertRequest is the body of POST /v1/convert. Source is opened by the
// server process, so paths in it are absolute.
type ConvertRequest struct {
	Source   string `json:"source"`
	Name     string `json:"name"`
	Platform string `json:"platform,omitempty"`
	// Credentials are for the registry that Source names, from the caller's own
	// files: the server has another user's, or none. They are used for this
	// request and kept nowhere.
	Credentials *Credentials `json:"credentials,omitempty"`
	// Limits are bounds of this conversion by name, in place of the server's.
	Limits map[string]int64 `json:"limits,omitempty"`
}

// Credentials are what a registry is shown.
type Credentials struct {
	Username      string `json:"username,omitempty"`
	Password      Secret `json:"password,omitempty"`
	IdentityToken Secret `json:"identity_token,omitempty"`
	RegistryToken Secret `json:"registry_token,omitempty"`
}

// Secret is a word that only the request has which brings it: it prints and logs as
// [redacted].
type Secret string

const redacted = "[redacted]"

// String implements fmt.Stringer.
func (Secret) String() string { return redacted }

// GoString implements fmt.GoStringer, for %#v.
func (Secret) GoString() string { return redacted }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// Progress is one step of long work.
type Progress struct {
	Step  string `json:"step"`            // constant, such as "layer"
	Item  string `json:"item,omitempty"`  // what it works on
	Done  int64  `json:"done"`            // units of Total
	Total int64  `json:"total,omitempty"` // 0 when not known
	Unit  string `json:"unit,omitempty"`  // "bytes" or what is counted
}

// ConvertResult is the end of a conversion.
type ConvertResult struct {
	Name           string       `json:"name"` // REPO:TAG
	Source         chunk.Digest `json:"source"`
	ImageID        chunk.Digest `json:"image_id"`
	Bootstrap      chunk.Digest `json:"bootstrap"`
	Platform       string       `json:"platform"`
	Signed         bool         `json:"signed"`
	Layers         int          `json:"layers"`
	LayersSkipped  int          `json:"layers_skipped"`
	NewChunks      int64        `json:"new_chunks"`
	PlainBytes     int64        `json:"plain_bytes"`
	NewPlainBytes  int64        `json:"new_plain_bytes"`
	NewStoredBytes int64        `json:"new_stored_bytes"`
}

// CheckRequest are the parameters of POST /v1/admin/check: quick in the query, and what
// else there is in a body.
type CheckRequest struct {
	Quick bool `json:"-"`
	// From is the URL of a store node of which the chunks are fetched that images lack.
	From      string `json:"from,omitempty"`
	FromToken string `json:"from_token,omitempty"` // shown to it
	FromCA    string `json:"from_ca,omitempty"`    // certificates (PEM) that it is held against
}

// maxCheckBody bounds the body of a CheckRequest: 4 MiB of certificates, escaped.
const maxCheckBody = 8 << 20

// Problem is one damage that a check found, or a state that it notes.
type Problem struct {
	Kind    string   `json:"kind"`             // constant, such as "chunk"
	Object  string   `json:"object"`           // key in the bucket
	Offset  int64    `json:"offset,omitempty"` // in the object
	Digest  string   `json:"digest,omitempty"` // of the chunk or object that is damaged
	Message string   `json:"message"`
	Images  []string `json:"images,omitempty"` // names of the images it touches; the last may be "and K more"
	Note    bool     `json:"note,omitempty"`   // a state and no damage: the summary does not count it
}

// CheckSummary is the end of a check.
type CheckSummary struct {
	Packs    int64 `json:"packs"`
	Chunks   int64 `json:"chunks"`
	Bytes    int64 `json:"bytes"`
	Images   int64 `json:"images"`
	Problems int64 `json:"problems"`
	// Of a repair: chunks that were stored anew, their bytes, and those that were not.
	Repaired      int64 `json:"repaired_chunks,omitempty"`
	RepairedBytes int64 `json:"repaired_bytes,omitempty"`
	Unrepaired    int64 `json:"unrepaired_chunks,omitempty"`
}

// RebuildResult is the end of an index rebuild.
type RebuildResult struct {
	Packs  int64 `json:"packs"`
	Chunks int64 `json:"chunks"`
}

// Event is one line of an NDJSON stream. Exactly one of result and error ends
// the stream; without it the stream is cut off.
type Event struct {
	Type     string          `json:"type"`
	Progress *Progress       `json:"progress,omitempty"`
	Problem  *Problem        `json:"problem,omitempty"`
	Result   json.RawMessage `json:"result,omitempty"`
	Error    *Error          `json:"error,omitempty"`
}

// Types of events.
const (
	EventProgress = "progress"
	EventProblem  = "problem"
	EventAlive    = "alive" // nothing happened for a while; keeps idle timeouts from firing
	EventResult   = "result"
	EventError    = "error"
)

// LeaseRequest is the body of PUT /v1/leases/<id>: gc keeps the image, and what the
// bootstrap names, as long as the lease lasts.
type LeaseRequest struct {
	TTLSeconds int64  `json:"ttl_seconds"`
	Image      string `json:"image"`               // image id, or text for people
	Bootstrap  string `json:"bootstrap,omitempty"` // its digest
}

// GCRequest is the body of POST /v1/admin/gc. Durations are as time.ParseDuration reads
// them; empty means the server's own.
type GCRequest struct {
	DryRun bool    `json:"dry_run"`
	Retain string  `json:"retain,omitempty"`
	Grace  string  `json:"grace,omitempty"`
	Wait   string  `json:"wait,omitempty"`
	Ratio  float64 `json:"ratio,omitempty"` // 0 = the server's own
	// PushGrace is how long ago a client must have been told of what was pushed and goes.
	PushGrace string `json:"push_grace,omitempty"`
}

// PinList answers GET /v1/admin/pins: the sources whose images stay.
type PinList struct {
	Pins []chunk.Digest `json:"pins"`
}

// LeaseList answers GET /v1/admin/leases.
type LeaseList struct {
	Leases []Lease `json:"leases"`
}

// StoreStats is the store's part of GET /v1/stats.
type StoreStats struct {
	ChunkSize int64 `json:"chunk_size_bytes"`
	Packs     int64 `json:"packs"`
	PackBytes int64 `json:"pack_bytes"`
	Names     int64 `json:"names"`
	// Epoch counts the writers that the store has had, 0 before the first that counted,
	// and Writer is who wrote last, or does.
	Epoch  uint64 `json:"epoch"`
	Writer string `json:"writer,omitempty"`
}

// Readiness answers GET /readyz. Journal is there on nodes that only read.
type Readiness struct {
	Status  string `json:"status"`
	Journal *Lag   `json:"journal,omitempty"`
}

// Lag is how far a node that only reads is behind the journal.
type Lag struct {
	Applied uint64  `json:"applied_entry"`   // the last entry that is in use here
	Entries int     `json:"behind_entries"`  // read and still to be applied
	Seconds float64 `json:"behind_seconds"`  // since it last had all that the journal has
	Error   string  `json:"error,omitempty"` // why it does not go on
}

// Stats answers GET /v1/stats. Version changes when a key changes its meaning.
type Stats struct {
	Version       int        `json:"version"`
	Store         StoreStats `json:"store"`
	Requests      uint64     `json:"requests"`       // since the server started
	BytesSent     uint64     `json:"bytes_sent"`     // bodies, since the server started
	UptimeSeconds float64    `json:"uptime_seconds"` // of the server
	Leases        int        `json:"leases"`         // live now
}
