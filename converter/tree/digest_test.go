package tree_test

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

func TestDigestGolden(t *testing.T) {
	// Changes only with the version in the domain string.
	const want = "sha256:4db370b4ed46a802227999692e469446446f659927c6f89fbbd2fbdaac67f452"
	if got := tree.Digest(sample(t, content{})).String(); got != want {
		t.Errorf("digest of the sample tree is %s, want %s", got, want)
	}
	if got, want := tree.Digest(merge(t)).String(), "sha256:412757bc9017ea70f1c0af5b4194bbfa42f2856f5d3fe7ac201d1eda43b2cbbd"; got != want {
		t.Errorf("digest of the empty tree is %s, want %s", got, want)
	}
}

// specDigest follows FORMAT.md word by word: all paths in memory, sorted.
func specDigest(t *rafs.Tree) chunk.Digest {
	type record struct {
		path string
		n    *rafs.Inode
	}
	var records []record
	_ = t.Walk(func(path string, n *rafs.Inode) error {
		path = path[1:]
		if n.IsDir() && n != t.Root {
			path += "/"
		}
		records = append(records, record{path, n})
		return nil
	})
	slices.SortFunc(records, func(a, b record) int { return cmp.Compare(a.path, b.path) })
	var b bytes.Buffer
	num := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	str := func(s string) { num(uint32(len(s))); b.WriteString(s) }
	b.WriteString("quarry tree v1\n")
	num(t.ChunkSize)
	first := map[*rafs.Inode]string{}
	for _, r := range records {
		r.path = strings.TrimSuffix(r.path, "/")
		if target, ok := first[r.n]; ok {
			b.WriteByte('L')
			str(r.path)
			str(target)
			continue
		}
		first[r.n] = r.path
		b.WriteByte('F')
		str(r.path)
		num(r.n.Mode)
		num(r.n.UID)
		num(r.n.GID)
		num(r.n.Mtime)
		num(r.n.MtimeNsec)
		num(r.n.Rdev)
		num(r.n.Size)
		str(r.n.Target)
		num(uint32(len(r.n.Xattrs)))
		for _, x := range r.n.Xattrs {
			str(x.Name)
			str(string(x.Value))
		}
		num(uint64(len(r.n.Chunks)))
		for _, d := range r.n.Chunks {
			b.Write(d[:])
		}
	}
	return sha256.Sum256(b.Bytes())
}

func TestDigestFollowsItsDocument(t *testing.T) {
	for _, tr := range []*rafs.Tree{sample(t, content{}), merge(t)} {
		if got, want := tree.Digest(tr), specDigest(tr); got != want {
			t.Errorf("digest %s, want %s", got, want)
		}
	}
}

// Names that differ around the slash try the order of paths.
func TestDigestOrderOfRandomTrees(t *testing.T) {
	names := []string{"a", "a-", "a-b", "a.", "a0", "a--", "b", "a-.", "\xff", " "}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var entries []image.Entry
		for range 1 + rng.IntN(20) {
			name := names[rng.IntN(len(names))]
			for rng.IntN(2) == 0 {
				name += "/" + names[rng.IntN(len(names))]
			}
			entries = append(entries, image.Entry{Name: name, Type: "05"[rng.IntN(2)]})
		}
		m := tree.NewMerger(tree.Config{})
		if m.Apply(entries) != nil {
			continue // a file in the place of a parent
		}
		tr := m.Tree()
		if got, want := tree.Digest(tr), specDigest(tr); got != want {
			t.Fatalf("digest %s, want %s, of\n%s", got, want, show(tr, content{}))
		}
	}
}

// Every change of a single field must change the digest, and no two changes
// may have the same one.
func TestEveryFieldCountsInTheDigest(t *testing.T) {
	build := func() *rafs.Tree { return sample(t, content{}) }
	seen := map[chunk.Digest]string{tree.Digest(build()): "no change"}
	note := func(name string, tr *rafs.Tree) {
		t.Helper()
		d := tree.Digest(tr)
		if other, ok := seen[d]; ok {
			t.Errorf("%s has the digest of %s", name, other)
		}
		seen[d] = name
	}
	tr := build()
	tr.ChunkSize *= 2
	note("chunk size", tr)
	for i, path := range pathsOf(build()) {
		for name, change := range changes {
			tr := build()
			n := nth(tr, i)
			if change(n) {
				note(fmt.Sprintf("%s of %q", name, path), tr)
			}
		}
	}
}

func pathsOf(tr *rafs.Tree) (paths []string) {
	seen := map[*rafs.Inode]bool{}
	_ = tr.Walk(func(path string, n *rafs.Inode) error {
		if !seen[n] {
			paths = append(paths, path)
		}
		seen[n] = true
		return nil
	})
	return paths
}

// nth returns the i-th inode in the order of pathsOf.
func nth(tr *rafs.Tree, i int) (found *rafs.Inode) {
	seen := map[*rafs.Inode]bool{}
	_ = tr.Walk(func(_ string, n *rafs.Inode) error {
		if !seen[n] && len(seen) == i {
			found = n
		}
		seen[n] = true
		return nil
	})
	return found
}

// changes alter one field each; they report false when the inode has none.
var changes = map[string]func(n *rafs.Inode) bool{
	"permission":   func(n *rafs.Inode) bool { n.Mode ^= 0o002; return true },
	"setuid":       func(n *rafs.Inode) bool { n.Mode ^= 0o4000; return true },
	"type":         func(n *rafs.Inode) bool { n.Mode ^= 0o010000; return n.IsRegular() },
	"uid":          func(n *rafs.Inode) bool { n.UID++; return true },
	"gid":          func(n *rafs.Inode) bool { n.GID++; return true },
	"mtime":        func(n *rafs.Inode) bool { n.Mtime++; return true },
	"mtime sign":   func(n *rafs.Inode) bool { n.Mtime = math.MinInt64; return true },
	"mtime ns":     func(n *rafs.Inode) bool { n.MtimeNsec++; return true },
	"rdev":         func(n *rafs.Inode) bool { n.Rdev++; return n.Rdev != 1 },
	"size":         func(n *rafs.Inode) bool { n.Size++; return n.Size > 1 },
	"target":       func(n *rafs.Inode) bool { n.Target += "x"; return n.Target != "x" },
	"new xattr":    func(n *rafs.Inode) bool { n.Xattrs = append(n.Xattrs, rafs.Xattr{Name: "user.zz"}); return true },
	"xattr name":   func(n *rafs.Inode) bool { return onXattr(n, func(x *rafs.Xattr) { x.Name += "n" }) },
	"xattr value":  func(n *rafs.Inode) bool { return onXattr(n, func(x *rafs.Xattr) { x.Value = append(x.Value, 0) }) },
	"lost xattr":   func(n *rafs.Inode) bool { k := len(n.Xattrs); n.Xattrs = n.Xattrs[:max(k, 1)-1]; return k > 0 },
	"chunk":        func(n *rafs.Inode) bool { return onChunk(n, func(d *chunk.Digest) { d[31] ^= 1 }) },
	"lost chunk":   func(n *rafs.Inode) bool { k := len(n.Chunks); n.Chunks = n.Chunks[:max(k, 1)-1]; return k > 0 },
	"name":         func(n *rafs.Inode) bool { return onEntry(n, func(d *rafs.Dirent) { d.Name += "~" }) },
	"lost name":    func(n *rafs.Inode) bool { k := len(n.Entries); n.Entries = n.Entries[:max(k, 1)-1]; return k > 0 },
	"lost link":    unlink,
	"moved border": moveBorder,
}

func onXattr(n *rafs.Inode, fn func(*rafs.Xattr)) bool {
	if len(n.Xattrs) == 0 {
		return false
	}
	n.Xattrs = slices.Clone(n.Xattrs)
	fn(&n.Xattrs[len(n.Xattrs)-1])
	return true
}

func onChunk(n *rafs.Inode, fn func(*chunk.Digest)) bool {
	if len(n.Chunks) == 0 {
		return false
	}
	n.Chunks = slices.Clone(n.Chunks)
	fn(&n.Chunks[len(n.Chunks)-1])
	return true
}

func onEntry(n *rafs.Inode, fn func(*rafs.Dirent)) bool {
	if len(n.Entries) == 0 {
		return false
	}
	fn(&n.Entries[len(n.Entries)-1])
	return true
}

// unlink makes the linked file h a file of its own with the same attributes and
// content.
func unlink(n *rafs.Inode) bool {
	for i, d := range n.Entries {
		if d.Name == "h" {
			clone := *d.Inode
			n.Entries[i].Inode = &clone
			return true
		}
	}
	return false
}

// moveBorder moves a byte from the end of an xattr's name to its value.
func moveBorder(n *rafs.Inode) bool {
	return onXattr(n, func(x *rafs.Xattr) {
		last := len(x.Name) - 1
		x.Name, x.Value = x.Name[:last], append([]byte{x.Name[last]}, x.Value...)
	})
}

func TestDigestIgnoresWhereSlicesComeFrom(t *testing.T) {
	a := sample(t, content{})
	b := sample(t, content{})
	_ = b.Walk(func(_ string, n *rafs.Inode) error {
		n.Entries = append(make([]rafs.Dirent, 0, 100), n.Entries...)
		n.Chunks = append([]chunk.Digest{}, n.Chunks...)
		n.Xattrs = append([]rafs.Xattr{}, n.Xattrs...)
		return nil
	})
	if tree.Digest(a) != tree.Digest(b) {
		t.Error("equal trees have different digests")
	}
}
