package converter_test

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
)

// netRaw is the file capability cap_net_raw+ep, acl is u::rwx,u:5:r--,g::r-x,m::r-x,o::r--.
const (
	netRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	acl    = "\x02\x00\x00\x00" +
		"\x01\x00\x07\x00\xff\xff\xff\xff" +
		"\x02\x00\x04\x00\x05\x00\x00\x00" +
		"\x04\x00\x05\x00\xff\xff\xff\xff" +
		"\x10\x00\x05\x00\xff\xff\xff\xff" +
		"\x20\x00\x04\x00\xff\xff\xff\xff"
)

// xattrReports are about extended attributes.
func xattrReports() []report {
	q := strconv.Quote
	caps := q("security.capability=" + netRaw)
	capsLibarchive := q("pax:LIBARCHIVE.xattr.security%2Ecapability=" + base64.StdEncoding.EncodeToString([]byte(netRaw)))
	access, deflt := q("system.posix_acl_access="+acl), q("system.posix_acl_default="+acl)
	var forty, thirty strings.Builder
	for i := range 40 {
		fmt.Fprintf(&forty, " user.%02d=%s", i, strings.Repeat("v", 2<<10))
	}
	for i := range 30 {
		fmt.Fprintf(&thirty, " user.%02d=%s", i, strings.Repeat("v", 9<<10))
	}
	fortyWords := strings.Fields(forty.String())
	for i := range fortyWords {
		fortyWords[i] = word(fortyWords[i])
	}
	big, tooBig := "user.big="+strings.Repeat("v", 65535), "user.big="+strings.Repeat("v", 65536)
	longest, tooLong := "user."+strings.Repeat("n", 250)+"=1", "user."+strings.Repeat("n", 251)+"=1"
	return []report{
		{num: 25, name: "a file capability, however it is written",
			variants: []string{`f ping "p" mode=0755 ` + caps, `f ping "p" mode=0755 ` + capsLibarchive, `f ping "p" mode=0755 ` + caps + " " + capsLibarchive},
			want:     `f ping "p" mode=0755 ` + caps},
		{num: 25, name: "xattrs of a directory, a symlink and the root", layers: []string{"d ./ user.r=0\nd d/ user.d=1\nl l -> d trusted.l=2 security.l=3"},
			want: "d \"\" user.r=0\nd d user.d=1\nl l -> d security.l=3 trusted.l=2"},
		{num: 25, name: "the names of a file share one set, the last value counts", layers: []string{"f a \"1\" user.x=1 user.y=1\nh b => a user.y=2 user.z=2"},
			want: "f a \"1\" user.x=1 user.y=2 user.z=2 nlink=2\nh b => a"},
		{num: 25, name: "the names of a file share one set over layers", layers: []string{"f a \"1\" user.x=1 user.y=1", "h b => a user.y=2 user.z=2"},
			want: "f a \"1\" user.x=1 user.y=2 user.z=2 nlink=2\nh b => a"},

		{num: 26, name: "POSIX ACLs are kept", layers: []string{`f f "1" ` + access + "\nd d/ " + access + " " + deflt},
			want: "d d " + access + " " + deflt + "\nf f \"1\" " + access},
		{num: 26, name: "names without a known prefix are left out and reported", layers: []string{`f f "1" btrfs.compression=zstd com.apple.provenance=x user.=y user.kept=1`},
			want: `f f "1" user.kept=1`, warnings: []string{`entry "f": xattr "btrfs.compression" left out`, `"com.apple.provenance"`, `"user."`}},

		{num: 27, name: "(a) a value of 65535 bytes", layers: []string{`f f "1" ` + big}, want: `f f "1" ` + word(big)},
		{num: 27, name: "(a) a value of 65536 bytes is refused", layers: []string{`f d/f "1" ` + tooBig},
			wantErr: []string{`entry "d/f"`, `"user.big"`, "65536 bytes", "at most 65535"}},
		{num: 27, name: "(b) forty values of 2 KiB", layers: []string{`f f "1"` + forty.String()}, want: `f f "1" ` + strings.Join(fortyWords, " ")},
		{num: 27, name: "(b) thirty values of 9 KiB are refused", layers: []string{`f d/f "1"` + thirty.String()},
			wantErr: []string{`entry "d/f"`, `"user.`, "XattrBytes"}},
		{num: 27, name: "(c) a name of 255 bytes", layers: []string{`f f "1" ` + longest}, want: `f f "1" ` + word(longest)},
		{num: 27, name: "(c) a name of 256 bytes is refused", layers: []string{`f d/f "1" ` + tooLong}, wantErr: []string{`entry "d/f"`, "nnn", "256 bytes"}},
		{num: 27, name: "(d) of one key twice the last counts", layers: []string{`f f "1" user.a=1 user.a=2`}, want: `f f "1" user.a=2`},
		{num: 27, name: "(d) a global header sets no xattrs", layers: []string{"g user.a=9 user.b=9\nf f \"1\" user.a=1"}, want: `f f "1" user.a=1`},
		{num: 27, name: "(e) a value of no bytes", layers: []string{`f f "1" user.a=`}, want: `f f "1" user.a=`},

		{num: 28, name: "names in all namespaces are found by name", layers: []string{`f f "1" user.xyz=1 trusted.foo=2 "security.selinux=system_u:object_r:bin_t:s0\x00" userx.y=3`},
			want:     `f f "1" "security.selinux=system_u:object_r:bin_t:s0\x00" trusted.foo=2 user.xyz=1`,
			warnings: []string{`"userx.y" left out`}},

		{num: 29, name: "what overlayfs obeys is left out and hides nothing", layers: []string{"d d/\nf d/child \"1\"",
			`d d/ trusted.overlay.opaque=y trusted.overlay.redirect=/x security.selinux=s
			f f "2" user.overlay.origin=00fb user.overlayed=1`},
			want:     "d d security.selinux=s\nf d/child \"1\"\nf f \"2\" user.overlayed=1",
			warnings: []string{`entry "d": xattr "trusted.overlay.opaque"`, `"trusted.overlay.redirect"`, `entry "f": xattr "user.overlay.origin"`}},
	}
}
