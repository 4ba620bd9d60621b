package tree_test

import (
	"archive/tar"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"quarry/rafs"
	"quarry/store/image"
)

// acl is u::rwx,u:5:r--,g::r-x,m::r-x,o::r-- as Linux stores it.
const acl = "\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" +
	"\x02\x00\x04\x00\x05\x00\x00\x00" +
	"\x04\x00\x05\x00\xff\xff\xff\xff" +
	"\x10\x00\x05\x00\xff\xff\xff\xff" +
	"\x20\x00\x04\x00\xff\xff\xff\xff"

// sample is a tree with every kind of file and attribute that an unpacked
// image can have on disk.
func sample(t testing.TB, c content) *rafs.Tree {
	t.Helper()
	long := strings.Repeat("long", 60)
	return merge(t, layer(t, c, `
		d ./ mode=0711 uid=3 gid=4 mtime=1234567890+123456789 user.root=1
		d a mode=01777
		f a/empty ""
		f a/small "hello" mode=04755 uid=70000 gid=2097152 mtime=1700000001+5
		d a/b mtime=-3
		d a/b/c
		f a-b "sorts between a and a/b" mtime=-2+500000000
		f a.b "as does this"
		f a0 "but not this"
		l sym -> ../../etc/hosts mtime=17
		h z/sym => sym
		p fifo mode=0600
		h z/fifo => fifo
		c null 1,3 mode=0666
		b disk 4095,1048575
		h z/disk => disk
		f z/x "" user.k=v trusted.t=1 security.s=x
		f "caf\xe9 \n\\" "odd"
		f "caf\u00e9" "not odd"
		l odd -> "t\xff"
		f big "`+strings.Repeat("0123456789", 1000)+`"
		h a/big => big
		d `+long+`
		f `+long+"/"+long+` "deep"
		l `+long+"/l -> "+strings.Repeat("t/", 1500)+`
		h `+long+"/h => "+long+"/"+long+`
	`), []image.Entry{{
		Name: "bin", Type: image.TypeReg, Mode: 0o755, Mtime: 1700000000,
		Xattrs: []rafs.Xattr{
			{Name: "security.capability", Value: []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")},
			{Name: "user.binary", Value: []byte("a\x00=\n\xff")},
			{Name: "user.none", Value: nil},
		},
	}, {
		Name: "acl", Type: image.TypeDir, Mode: 0o754, Mtime: 1700000000,
		Xattrs: []rafs.Xattr{
			{Name: "system.posix_acl_access", Value: []byte(acl)},
			{Name: "system.posix_acl_default", Value: []byte(acl)},
		},
	}, {
		Name: "sparse", Type: image.TypeReg, Mode: 0o644, Size: 50 * chunkSize, Mtime: 1700000000,
		Chunks: slices.Repeat(c.put(make([]byte, chunkSize)), 50),
	}})
}

// readTar returns the entries of a tar with their content put in c.
func readTar(t testing.TB, c content, r io.Reader) []image.Entry {
	t.Helper()
	var entries []image.Entry
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return entries
		}
		if err != nil {
			t.Fatal(err)
		}
		p, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		e := image.Entry{
			Name: strings.TrimSuffix(h.Name, "/"), Type: h.Typeflag, Mode: uint32(h.Mode), UID: uint32(h.Uid), GID: uint32(h.Gid),
			Mtime: h.ModTime.Unix(), MtimeNsec: uint32(h.ModTime.Nanosecond()),
			Major: uint32(h.Devmajor), Minor: uint32(h.Devminor), Link: h.Linkname, Size: h.Size, Chunks: c.put(p),
		}
		for key, value := range h.PAXRecords {
			if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
				e.Xattrs = append(e.Xattrs, rafs.Xattr{Name: name, Value: []byte(value)})
			}
		}
		entries = append(entries, e)
	}
}
