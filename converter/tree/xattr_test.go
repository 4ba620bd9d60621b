package tree_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/image"
)

func xattrEntry(name string, typ byte, xs ...rafs.Xattr) image.Entry {
	e := image.Entry{Name: name, Type: typ, Xattrs: xs}
	if typ == image.TypeSymlink {
		e.Link = "target"
	}
	return e
}

func xattr(name, value string) rafs.Xattr { return rafs.Xattr{Name: name, Value: []byte(value)} }

// applyOne merges one entry and returns its inode and the attributes that were
// reported as left out.
func applyOne(t *testing.T, e image.Entry) (*rafs.Inode, []string, error) {
	t.Helper()
	var dropped []string
	m := tree.NewMerger(tree.Config{Warn: func(w tree.Warning) {
		if w.Layer != 1 || w.Name != e.Name || w.Reason == "" {
			t.Errorf("warning %+v for entry %q of layer 1", w, e.Name)
		}
		dropped = append(dropped, w.Xattr)
	}})
	if err := m.Apply([]image.Entry{e}); err != nil {
		return nil, nil, err
	}
	return m.Tree().Root.Entries[0].Inode, dropped, nil
}

func TestXattrPolicy(t *testing.T) {
	capability := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	tests := []struct {
		name      string
		typ       byte
		have      []rafs.Xattr
		kept, out []string // names
	}{
		{"bug 25: file capabilities are kept to the byte", image.TypeReg, []rafs.Xattr{xattr("security.capability", capability)}, []string{"security.capability"}, nil},
		{"bug 26: POSIX ACLs are kept, unknown prefixes and bare ones are reported", image.TypeDir,
			[]rafs.Xattr{xattr("system.posix_acl_access", "a"), xattr("system.posix_acl_default", "d"), xattr("btrfs.compression", "zstd"), xattr("com.apple.provenance", "x"), xattr("user.", "y"), xattr("system.nfs4_acl", "z")},
			[]string{"system.posix_acl_access", "system.posix_acl_default"}, []string{"btrfs.compression", "com.apple.provenance", "user.", "system.nfs4_acl"}},
		{"bug 26: a default ACL belongs to directories only", image.TypeReg, []rafs.Xattr{xattr("system.posix_acl_default", "d")}, nil, []string{"system.posix_acl_default"}},
		{"bug 28: names in all three namespaces", image.TypeReg,
			[]rafs.Xattr{xattr("user.xyz", "1"), xattr("trusted.foo", "2"), xattr("security.selinux", "system_u:object_r:bin_t:s0\x00"), xattr("userx.y", "3")},
			[]string{"security.selinux", "trusted.foo", "user.xyz"}, []string{"userx.y"}},
		{"bug 29: overlayfs's own are left out", image.TypeDir,
			[]rafs.Xattr{xattr("trusted.overlay.opaque", "y"), xattr("user.overlay.origin", "\x00\xfb"), xattr("trusted.overlay.redirect", "/x"), xattr("security.selinux", "s"), xattr("user.overlayed", "1")},
			[]string{"security.selinux", "user.overlayed"}, []string{"trusted.overlay.opaque", "user.overlay.origin", "trusted.overlay.redirect"}},
		{"symlinks have no user attributes and no ACL", image.TypeSymlink,
			[]rafs.Xattr{xattr("user.a", "1"), xattr("trusted.a", "2"), xattr("system.posix_acl_access", "3")}, []string{"trusted.a"}, []string{"user.a", "system.posix_acl_access"}},
		{"devices have no user attributes", image.TypeChar, []rafs.Xattr{xattr("user.a", "1"), xattr("security.a", "2")}, []string{"security.a"}, []string{"user.a"}},
		{"bug 32: a name may hold an equals sign", image.TypeReg, []rafs.Xattr{xattr("user.a=b", "1")}, []string{"user.a=b"}, nil},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			n, out, err := applyOne(t, xattrEntry("x", tc.typ, tc.have...))
			if err != nil {
				t.Fatal(err)
			}
			var kept []string
			for _, x := range n.Xattrs {
				kept = append(kept, x.Name)
				i := slices.IndexFunc(tc.have, func(h rafs.Xattr) bool { return h.Name == x.Name })
				if string(tc.have[i].Value) != string(x.Value) {
					t.Errorf("%s is %q, want %q", x.Name, x.Value, tc.have[i].Value)
				}
			}
			if !slices.Equal(kept, tc.kept) || !slices.Equal(out, tc.out) {
				t.Errorf("kept %q and left out %q, want %q and %q", kept, out, tc.kept, tc.out)
			}
		})
	}
}

func TestXattrLimits(t *testing.T) {
	var forty, tooMany, tooLong []rafs.Xattr
	for i := range 40 {
		forty = append(forty, xattr(fmt.Sprintf("user.%d", i), strings.Repeat("v", 2<<10)))
	}
	for i := range 5 {
		tooMany = append(tooMany, xattr(fmt.Sprintf("user.%d", i), strings.Repeat("v", 60000)))
	}
	for i := range 300 {
		tooLong = append(tooLong, xattr(fmt.Sprintf("user.%0250d", i), ""))
	}
	tests := []struct {
		name    string
		have    []rafs.Xattr
		want    int
		wantErr string
	}{
		{"bug 27a: a value of 65535 bytes", []rafs.Xattr{xattr("user.big", strings.Repeat("v", 65535))}, 1, ""},
		{"bug 27a: a value of 65536 bytes", []rafs.Xattr{xattr("user.big", strings.Repeat("v", 65536))}, 0, `"user.big" has 65536 bytes`},
		{"bug 27b: forty values of 2 KiB", forty, 40, ""},
		{"bug 27b: values of 300 kB together", tooMany, 0, "its 5 xattrs take 300"},
		{"bug 27c: a name of 255 bytes", []rafs.Xattr{xattr("user."+strings.Repeat("n", 250), "")}, 1, ""},
		{"bug 27c: a name of 256 bytes", []rafs.Xattr{xattr("user."+strings.Repeat("n", 251), "")}, 0, "has 256 bytes"},
		{"bug 27d: one name twice, the last counts", []rafs.Xattr{xattr("user.a", "1"), xattr("user.a", "2")}, 1, ""},
		{"bug 27e: an empty value", []rafs.Xattr{xattr("user.a", "")}, 1, ""},
		{"a list of names that listxattr cannot return", tooLong, 0, "at most"},
		{"a name with a NUL", []rafs.Xattr{xattr("user.a\x00b", "")}, 0, "NUL"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			n, _, err := applyOne(t, xattrEntry("a/file", image.TypeReg, tc.have...))
			if tc.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tc.wantErr) || !strings.Contains(err.Error(), `entry "a/file"`) {
					t.Fatalf("error %v, want one with %q and the entry's name", err, tc.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			n = n.Entries[0].Inode
			if len(n.Xattrs) != tc.want {
				t.Fatalf("%d xattrs, want %d", len(n.Xattrs), tc.want)
			}
			if last := tc.have[len(tc.have)-1]; tc.want == 1 && string(n.Xattrs[0].Value) != string(last.Value) {
				t.Errorf("value %q, want %q", n.Xattrs[0].Value, last.Value)
			}
		})
	}
}

// The kept attributes must be ones that rafs can encode.
func TestKeptXattrsFitTheBootstrap(t *testing.T) {
	var xs []rafs.Xattr
	for i := range 4 {
		xs = append(xs, xattr(fmt.Sprintf("user.%d", i), strings.Repeat("v", 65500)))
	}
	m := tree.NewMerger(tree.Config{})
	if err := m.Apply([]image.Entry{xattrEntry("f", image.TypeReg, xs...)}); err != nil {
		t.Fatal(err)
	}
	if _, err := rafs.Encode(m.Tree()); err != nil {
		t.Fatal(err)
	}
}
