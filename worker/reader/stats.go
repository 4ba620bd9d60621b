package reader

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"quarry/nbd/blockdev"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker/timeline"
)

// ReadError is one chunk that reads of an image were answered with EIO for.
type ReadError struct {
	Path    string        `json:"path"` // a file that uses the chunk
	Chunk   chunk.Digest  `json:"chunk"`
	Outcome store.Outcome `json:"outcome"`
	Err     string        `json:"error"`
	When    time.Time     `json:"when"`
}

const (
	// maxReadErrors bounds the failed reads that an image remembers.
	maxReadErrors = 64
	// maxErrorText bounds what is kept of one error: a store node's word in it may
	// be of any length.
	maxErrorText = 4 << 10
)

// Stats counts what one image cost since the reader opened it. All sizes
// are in bytes.
type Stats struct {
	Opening     string    `json:"opening"` // names the reader and its opening of the image
	Opened      time.Time `json:"opened"`
	Requests    int64     `json:"requests"`
	WireBytes   int64     `json:"wire_bytes"`
	BucketBytes int64     `json:"bucket_bytes"`            // read by store nodes from their buckets, as they say
	ChunkBytes  int64     `json:"chunk_plain_bytes"`       // chunks from stores, decompressed
	DeviceBytes int64     `json:"device_bytes"`            // asked of the device
	OwnBytes    int64     `json:"bootstrap_or_zero_bytes"` // of DeviceBytes, those that are no chunk's
	Touched     Count     `json:"touched"`                 // different chunks that reads touched
	Pulled      Count     `json:"pulled"`                  // of ChunkBytes, by pulls
	// Tiers says which bytes of DeviceBytes came from where, in the order in which
	// a read asks. What is neither there nor in OwnBytes was not answered: those
	// reads failed, or are under way.
	Tiers []Tier `json:"tiers"`
	// Failed counts chunks that could not be had, by outcome; one that is asked for
	// again and fails again counts again.
	Failed      map[store.Outcome]int64 `json:"failed_by_outcome"`
	FailedReads int64                   `json:"failed_reads"` // the sum of Failed; of a run, what its shim counts when that is more
	Errors      []ReadError             `json:"read_errors"`  // the last 64
	// DiskBad counts copies on this machine's disk that were found bad, dropped, and
	// fetched again; DiskFailed reads that the disk failed.
	DiskBad    int64      `json:"disk_bad_copies"`
	DiskFailed int64      `json:"disk_failed"`
	Prefetch   Prefetch   `json:"prefetch"`
	Hedged     Hedged     `json:"hedged"`
	Slowest    []SlowRead `json:"slowest_reads"` // of those since the image was opened
}

// The tiers, in the order in which a read asks them.
const (
	TierMemory = string(blockdev.TierMemory) // verified bytes in the reader's memory
	TierDisk   = string(blockdev.TierDisk)   // the cache on this machine's disk
	TierStart  = string(blockdev.TierStart)  // came in the answer to /v1/start
	TierStore  = string(blockdev.TierStore)  // fetched from a store node
)

// Count is chunks and their plain bytes.
type Count struct {
	Chunks int64 `json:"chunks"`
	Bytes  int64 `json:"bytes"`
}

// Tier is what one place gave. A read that touches three chunks counts as three.
type Tier struct {
	Tier      string `json:"tier"`
	Reads     int64  `json:"reads"` // answered
	ReadBytes int64  `json:"read_bytes"`
	Fetched   Count  `json:"fetched"` // whole chunks taken from it; none from memory
}

// Prefetch is what was fetched before a read asked for it.
type Prefetch struct {
	Fetched Count `json:"fetched"`
	Used    Count `json:"used"`   // asked for later
	Unused  Count `json:"unused"` // left the memory unasked for
	Failed  int64 `json:"failed"` // chunks that could not be had, which failed no read
}

// Hedged is what was asked for a second time, as it was late. Less Twice, each chunk
// was fetched once.
type Hedged struct {
	Asked Count `json:"asked"` // by reads, though it was on its way unasked for
	Twice Count `json:"twice"` // chunks that came both ways
	// Requests are second requests to stores for chunks that did not come; Won are
	// those that brought a chunk first, and Again the chunks that were asked for once
	// more, by them and after failures.
	Requests int64 `json:"requests"`
	Won      int64 `json:"requests_won"`
	Again    int64 `json:"asked_again"`
}

// SlowRead is one of the reads that waited longest for a chunk.
type SlowRead struct {
	Path   string       `json:"path"` // a file that uses the chunk
	Chunk  chunk.Digest `json:"chunk"`
	Number int          `json:"chunk_number"` // in the image's chunk table
	Tier   string       `json:"tier"`         // that answered; "" when none did
	Wait   float64      `json:"wait_ms"`
	When   time.Time    `json:"when"` // it was answered
}

// Since subtracts an earlier reading of the same opening, taken at a moment. With
// several sandboxes of one image at once the traffic of all of them is in it:
// they share the mount.
func (a Stats) Since(b Stats, from time.Time) Stats {
	d := a.combine(b, -1)
	d.Errors = a.Errors[max(0, len(a.Errors)-int(d.FailedReads)):]
	d.Slowest = slices.DeleteFunc(slices.Clone(a.Slowest), func(s SlowRead) bool { return s.When.Before(from) })
	return d
}

// plus adds the counts of another opening.
func (a Stats) plus(b Stats) Stats {
	if a.Tiers == nil {
		a.Tiers = emptyTiers()
	}
	return a.combine(b, 1)
}

// combine returns the counts of a and sign times those of b, and nothing else of b.
func (a Stats) combine(b Stats, sign int64) Stats {
	count := func(x, y Count) Count { return Count{x.Chunks + sign*y.Chunks, x.Bytes + sign*y.Bytes} }
	a.Requests += sign * b.Requests
	a.WireBytes += sign * b.WireBytes
	a.BucketBytes += sign * b.BucketBytes
	a.ChunkBytes += sign * b.ChunkBytes
	a.DeviceBytes += sign * b.DeviceBytes
	a.OwnBytes += sign * b.OwnBytes
	a.Touched = count(a.Touched, b.Touched)
	a.Pulled = count(a.Pulled, b.Pulled)
	a.Tiers = slices.Clone(a.Tiers)
	for i, t := range a.Tiers {
		if k := slices.IndexFunc(b.Tiers, func(o Tier) bool { return o.Tier == t.Tier }); k >= 0 {
			o := b.Tiers[k]
			a.Tiers[i] = Tier{t.Tier, t.Reads + sign*o.Reads, t.ReadBytes + sign*o.ReadBytes, count(t.Fetched, o.Fetched)}
		}
	}
	failed := map[store.Outcome]int64{}
	for _, o := range store.Outcomes {
		if n := a.Failed[o] + sign*b.Failed[o]; n != 0 {
			failed[o] = n
		}
	}
	a.Failed = failed
	a.FailedReads += sign * b.FailedReads
	a.DiskBad += sign * b.DiskBad
	a.DiskFailed += sign * b.DiskFailed
	p, o := a.Prefetch, b.Prefetch
	a.Prefetch = Prefetch{count(p.Fetched, o.Fetched), count(p.Used, o.Used), count(p.Unused, o.Unused), p.Failed + sign*o.Failed}
	h, k := a.Hedged, b.Hedged
	a.Hedged = Hedged{count(h.Asked, k.Asked), count(h.Twice, k.Twice), h.Requests + sign*k.Requests, h.Won + sign*k.Won, h.Again + sign*k.Again}
	return a
}

// WithLists returns the figures with empty lists, and tiers of which nothing was
// taken, in the place of those that are not there.
func (a Stats) WithLists() Stats {
	if a.Tiers == nil {
		a.Tiers = emptyTiers()
	}
	if a.Failed == nil {
		a.Failed = map[store.Outcome]int64{}
	}
	if a.Errors == nil {
		a.Errors = []ReadError{}
	}
	if a.Slowest == nil {
		a.Slowest = []SlowRead{}
	}
	return a
}

// emptyTiers are all tiers with nothing taken from them.
func emptyTiers() (tiers []Tier) {
	for _, t := range []string{TierMemory, TierDisk, TierStart, TierStore} {
		tiers = append(tiers, Tier{Tier: t})
	}
	return tiers
}

func (im *openImage) readFailed(e *blockdev.ReadError) {
	im.failed.note(ReadError{Path: e.Path, Chunk: e.Chunk, Outcome: e.Outcome, Err: e.Err.Error(), When: time.Now()})
}

// failures are the chunks of one image that could not be had. Safe for
// concurrent use.
type failures struct {
	mu        sync.Mutex // guards what follows
	byOutcome map[store.Outcome]int64
	total     int64
	last      []ReadError
}

// note notes one more and returns how many there are.
func (f *failures) note(e ReadError) int64 {
	if e.Outcome == "" { // the fetch was cancelled under a read
		e.Outcome = store.Unreachable
	}
	if len(e.Err) > maxErrorText {
		e.Err = e.Err[:maxErrorText] + "…"
	}
	e.Path, e.Err = inUTF8(e.Path), inUTF8(e.Err)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byOutcome == nil {
		f.byOutcome = map[store.Outcome]int64{}
	}
	f.byOutcome[e.Outcome]++
	f.total++
	if len(f.last) == maxReadErrors {
		f.last = slices.Delete(f.last, 0, 1)
	}
	f.last = append(f.last, e)
	return f.total
}

// inUTF8 writes bytes that are not UTF-8 as \xNN: JSON, in which a name travels, has
// no place for them.
func inUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 {
			fmt.Fprintf(&b, `\x%02x`, s[0])
		} else {
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// fill puts the failures into st.
func (f *failures) fill(st *Stats) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st.Failed, st.FailedReads = maps.Clone(f.byOutcome), f.total
	st.Errors = append([]ReadError{}, f.last...)
}

// stats is what Stats says now.
func (im *openImage) stats() Stats {
	t, d := im.src.Traffic(), im.Device.Stats()
	st := Stats{
		Opening: fmt.Sprintf("%d-%d", os.Getpid(), im.number), Opened: im.opened,
		Requests: t.Requests, WireBytes: t.WireBytes, BucketBytes: t.BucketBytes,
		DeviceBytes: d.ReadBytes, OwnBytes: d.OwnBytes, Touched: Count(d.Touched),
		Pulled: Count{im.pulledChunks.Load(), im.pulledBytes.Load()},
		Tiers: []Tier{
			tierOf(blockdev.TierMemory, d.Memory), tierOf(blockdev.TierDisk, d.Disk),
			tierOf(blockdev.TierStart, d.Start), tierOf(blockdev.TierStore, d.Store),
		},
		DiskBad: d.DiskCorrupt + im.pulledBad.Load(), DiskFailed: d.DiskFailed + im.pullDiskFailed.Load(),
		Prefetch: Prefetch{Count(d.AheadFetched), Count(d.AheadUsed), Count(d.AheadUnused), d.AheadFailed},
		Hedged:   Hedged{Count(d.Hedged), Count(d.Twice), t.Hedges, t.HedgesWon, t.AskedAgain},
		Slowest:  []SlowRead{},
	}
	st.ChunkBytes = d.Store.Fetched.Bytes + d.Start.Fetched.Bytes + st.Pulled.Bytes
	for _, s := range im.Device.Slowest() {
		st.Slowest = append(st.Slowest, SlowRead{inUTF8(s.Path), s.Chunk, s.Number, string(s.Tier), timeline.Millis(s.Wait), s.When})
	}
	im.failed.fill(&st)
	return st
}

func tierOf(name blockdev.Tier, s blockdev.TierStats) Tier {
	return Tier{string(name), s.Reads, s.ReadBytes, Count(s.Fetched)}
}
