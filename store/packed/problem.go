package packed

import (
	"fmt"

	"quarry/store/chunk"
)

// ProblemKind says what is wrong.
type ProblemKind string

const (
	// PackMissing: the journal names a pack whose object is gone, or something that
	// is no object has its place.
	PackMissing ProblemKind = "pack-missing"
	// PackDamaged: the parts of a pack between its stored chunks are damaged.
	PackDamaged ProblemKind = "pack-damaged"
	// ChunkDamaged: a stored copy of a chunk is not that chunk.
	ChunkDamaged ProblemKind = "chunk-damaged"
	// IndexWrong: the index points to where the chunk is not.
	IndexWrong ProblemKind = "index-wrong"
	// IndexMissing: the index lacks a chunk that is stored and not condemned.
	IndexMissing ProblemKind = "index-missing"
)

// Action says what was done about a problem.
type Action string

const (
	// None: nothing could or had to be done. Converting the image again stores
	// anew what is lost with a missing pack, or the pack comes back.
	None Action = "none"
	// Condemned: the copy is out of use; converting the image again stores the
	// chunk anew.
	Condemned Action = "condemned"
	// Repaired: the pack was stored again as it was written.
	Repaired Action = "repaired"
	// Reindexed: the index entry was corrected.
	Reindexed Action = "reindexed"
)

// Problem is one thing that is wrong with a store.
type Problem struct {
	Kind   ProblemKind
	Pack   chunk.Digest
	Chunk  chunk.Digest // zero when no single chunk is meant
	Off    int64        // of the chunk's stored bytes in the pack
	Err    error        // what is wrong
	Action Action
}

// String is the problem in one line.
func (p Problem) String() string {
	where := fmt.Sprintf("pack %s", p.Pack)
	if !p.Chunk.IsZero() {
		where = fmt.Sprintf("chunk %s in pack %s at %d", p.Chunk, p.Pack, p.Off)
	}
	return fmt.Sprintf("%s: %s: %v (%s)", p.Kind, where, p.Err, p.Action)
}
