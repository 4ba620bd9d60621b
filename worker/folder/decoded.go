package folder

import (
	"slices"
	"strings"
	"sync"

	"quarry/rafs"
	"quarry/store/chunk"
)

const (
	// maxDecoded bounds how many images a Decoded keeps.
	maxDecoded = 64
	// maxDecodedBytes bounds their bootstraps together. What is kept of one, its blobs
	// and chunks without the tree, takes about a third of its length.
	maxDecodedBytes = 256 << 20
)

// Decoded keeps what was decoded of bootstraps, for a process that uses the same
// images again and again: to decode one takes several times as long as to verify it.
// It says nothing of what is in the folder or whom to trust: a bootstrap is looked up
// by the digest that its bytes were just found to have. Its zero value is empty; it is
// safe for concurrent use.
type Decoded struct {
	mu   sync.Mutex // guards list
	list []*decoded // those used last at the end
}

// decoded is what is kept of one bootstrap.
type decoded struct {
	digest chunk.Digest
	size   int64
	done   chan struct{} // closed when what follows is set
	image  *rafs.Image   // without its tree
	acl    bool
	err    error
}

// decode is decodeBootstrap of verified bytes with that digest. The image has its tree
// when it was decoded for this caller, else not. Whoever asks while the same bytes are
// being decoded waits for that.
func (c *Decoded) decode(d chunk.Digest, boot []byte) (*rafs.Image, bool, error) {
	if c == nil || len(boot) > maxDecodedBytes {
		return decodeBootstrap(boot)
	}
	e, mine := c.entry(d, int64(len(boot)))
	if !mine {
		<-e.done
		return e.image, e.acl, e.err
	}
	im, acl, err := decodeBootstrap(boot)
	if e.acl, e.err = acl, err; err == nil {
		bare := *im
		bare.Tree = nil
		e.image = &bare
	} else {
		c.forget(e)
	}
	close(e.done)
	return im, acl, err
}

// entry finds what is kept, or makes room for it and leaves it to the caller to fill.
func (c *Decoded) entry(d chunk.Digest, size int64) (e *decoded, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.IndexFunc(c.list, func(e *decoded) bool { return e.digest == d }); i >= 0 {
		e = c.list[i]
		c.list = append(slices.Delete(c.list, i, i+1), e)
		return e, false
	}
	e = &decoded{digest: d, size: size, done: make(chan struct{})}
	c.list = append(c.list, e)
	var total int64
	for i, k := range slices.Backward(c.list) {
		if total += k.size; total > maxDecodedBytes || len(c.list)-i > maxDecoded {
			c.list = slices.Delete(c.list, 0, i+1)
			break
		}
	}
	return e, true
}

func (c *Decoded) forget(e *decoded) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = slices.DeleteFunc(c.list, func(k *decoded) bool { return k == e })
}

// decodeBootstrap reads a bootstrap, and whether a file of it has a POSIX ACL.
func decodeBootstrap(boot []byte) (*rafs.Image, bool, error) {
	im, err := rafs.Decode(boot)
	if err != nil {
		return nil, false, err
	}
	return im, hasACL(im.Tree.Root), nil
}

// hasACL reports whether a file or directory of the tree below n, or n, has a
// POSIX ACL.
func hasACL(n *rafs.Inode) bool {
	for _, x := range n.Xattrs {
		if strings.HasPrefix(x.Name, "system.posix_acl_") {
			return true
		}
	}
	for _, d := range n.Entries {
		if hasACL(d.Inode) {
			return true
		}
	}
	return false
}
