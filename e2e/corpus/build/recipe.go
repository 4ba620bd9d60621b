// Package build makes the images of the corpus: real file systems from Debian
// packages, wheels and npm packages, as OCI layouts. What is measured about
// deduplication and chunk sizes should be measured on what people push.
package build

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// Recipe says how one image is made. Members of a family have the same base and
// dependencies and another checkout, as the task images of one RL data set do;
// each is built from nothing of the others but downloaded files.
type Recipe struct {
	Family string
	N      int
	Order  Order
	// Variant is mmdebstrap's: minbase, or extract, which runs no package's
	// scripts. The packages are in the first layer.
	Variant  string
	Packages []string
	Steps    []Step // one layer each
	Env      []string
	Cmd      []string
}

// Step is one further layer, as a RUN line of a Dockerfile makes it.
type Step struct {
	Packages []string // installed with apt-get before Script
	Script   string   // for sh -e in the image, with network
}

// Order is the order of a layer's entries: builders differ in it.
type Order string

// Orders of entries.
const (
	ByName  Order = "name"    // umoci, BuildKit
	ByInode Order = "inode"   // tar --sort=inode
	ByWalk  Order = "readdir" // tar, as the folder lists them
)

// Name is the image's folder in the corpus.
func (r Recipe) Name() string { return fmt.Sprintf("%s-%d", r.Family, r.N) }

// version changes when the same recipe makes other layers.
const version = 1

// id names everything the image depends on, so that a changed recipe is built
// again.
func (r Recipe) id() string {
	b, err := json.Marshal(struct {
		Version int
		Recipe  Recipe
	}{version, r})
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
