package check

import (
	"fmt"
	"slices"

	"quarry/store/catalog"
	"quarry/store/chunk"
)

// MaxImages bounds the images that one problem names: 20 of the longest names
// are 8 KiB, and a chunk of a base image can be in every image there is.
const MaxImages = 20

// users are the images that something touches: how many, and the first of them
// in bytewise order. It is bounded as there is one for every damaged chunk.
type users struct {
	first []string // sorted, at most MaxImages
	count int
	last  chunk.Digest // source added last, so that two platforms of it count once
}

// add adds others, none of which is among u.
func (u *users) add(others users) {
	u.first = slices.Concat(u.first, others.first)
	slices.Sort(u.first)
	u.first = u.first[:min(len(u.first), MaxImages)]
	u.count += others.count
}

// addSource is add for the users of a source. Equal sources follow one another.
func (u *users) addSource(source chunk.Digest, others users) {
	if u.last != source {
		u.last = source
		u.add(others)
	}
}

// list returns the first images and, when there are more, how many.
func (u users) list() []string {
	if more := u.count - len(u.first); more > 0 {
		return append(slices.Clone(u.first), fmt.Sprintf("and %d more", more))
	}
	return u.first
}

func nameUser(n catalog.Name) users { return users{first: []string{n.Repo + ":" + n.Tag}, count: 1} }

// users names an image: by its names, or by its source digest when it has none.
func (c *checker) users(source chunk.Digest) users {
	if u := c.named[source]; u != nil {
		return *u
	}
	return users{first: []string{source.String()}, count: 1}
}
