package converter_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// deep is a file whose path has n bytes, in directories of 255, and its tree.
func deep(n int) (layer, want string) {
	var b strings.Builder
	rest := n
	path := ""
	for rest > 255 {
		dir := min(255, rest-2)
		path += strings.Repeat("d", dir)
		fmt.Fprintf(&b, "d %s mtime=0\n", word(path))
		path, rest = path+"/", rest-dir-1
	}
	path += strings.Repeat("f", rest)
	fmt.Fprintf(&b, "f %s \"1\"\n", word(path))
	return "f " + path + " \"1\"", b.String()
}

// cut returns an archive that ends after an entry's header.
func cut(t testing.TB, line string) []byte { return parseEntry(t, line).bytes() }

// nameReports are about names.
func nameReports() []report {
	long, longer := strings.Repeat("n", 255), strings.Repeat("n", 256)
	cafe := `"caf\xe9"`
	longCafe := strings.Repeat("x", 100) + "caf\xe9"
	odd := []string{`"new\nline"`, `"back\\slash"`, `"\x01"`, `"\x7f"`}
	split := strings.Repeat("p", 155) + "/" + strings.Repeat("q", 100)
	at4095, tree4095 := deep(4095)
	at4096, tree4096 := deep(4096)
	at5000, tree5000 := deep(5000)
	target := func(n int) string { return "l s -> " + strings.Repeat("t", n) }
	longDir := strings.Repeat("k", 60) + "/" + strings.Repeat("k", 60)
	all := []report{
		{num: 32, name: "a name of other bytes than UTF-8",
			variants: []string{`f ` + cafe + ` "1" as=ustar`, `f ` + cafe + ` "1" as=gnu`,
				`f short "1" "pax:path=caf\xe9"`, `f short "1" pax:hdrcharset=BINARY "pax:path=caf\xe9"`},
			want: `f ` + cafe + ` "1"`},
		{num: 32, name: "a long name of other bytes than UTF-8",
			variants: []string{`f ` + strconv.Quote(longCafe) + ` "1" as=gnu`, `f ` + strconv.Quote(longCafe) + ` "1"`},
			want:     `f ` + word(longCafe) + ` "1"`},
		{num: 32, name: "names of odd bytes", layers: []string{"f " + odd[0] + " \"1\"\nf " + odd[1] + " \"2\"\nf " + odd[2] + " \"3\"\nf " + odd[3] + " \"4\""},
			want: "f " + odd[2] + " \"3\"\nf " + odd[1] + " \"2\"\nf " + odd[0] + " \"1\"\nf " + odd[3] + " \"4\""},
		{num: 32, name: "two forms of one letter are two files", layers: []string{"f e\u0301 \"1\"\nf \u00e9 \"2\""}, want: "f e\u0301 \"1\"\nf \u00e9 \"2\""},
		{num: 32, name: "a target of odd bytes", layers: []string{`l s -> "\xff\n"`}, want: `l s -> "\xff\n"`},
		{num: 32, name: "owners' names are not looked at", layers: []string{`f a "1" "uname=\xff\xfe" "pax:uname=\xff" "pax:gname=\xff"`}, want: `f a "1"`},
		{num: 32, name: "an xattr name with an equals sign",
			variants: []string{`f a "1" "pax:LIBARCHIVE.xattr.user.a%3Db=MQ"`}, want: `f a "1" user.a=b=1`},
		{num: 32, name: "an xattr record's name ends at its first equals sign, and is taken as it is", layers: []string{`f a "1" user.a=b=1 user.c%3Dd=2`},
			want: `f a "1" user.a=b=1 user.c%3Dd=2`},
		{num: 32, name: "no name", variants: []string{`f "" "1"`, `l "" -> x`, `h "" => x`}, wantErr: []string{`entry ""`, "no name"}},
		{num: 32, name: "a refusal shows the bytes of the name", variants: []string{`f "d/caf\xe9" "1" type=Z`}, wantErr: []string{`entry "d/caf\xe9"`}},

		{num: 33, name: "a name of 255 bytes",
			variants: []string{"f " + long + ` "1"`, "f " + long + ` "1" as=gnu`, "f " + long + ` "1" pax:path=` + long}, want: "f " + word(long) + ` "1"`},
		{num: 33, name: "255 bytes in every type", layers: []string{"d d/\nd d/" + long + "/\nd l/\nl l/" + long + " -> x\nf f \"1\"\nd h/\nh h/" + long + " => f"},
			want: "d d\nd " + word("d/"+long) + "\nf f \"1\" nlink=2\nd h\nh " + word("h/"+long) + " => f\nd l\nl " + word("l/"+long) + " -> x"},
		{num: 33, name: "a name of 256 bytes is refused", layers: []string{`f f "1"`},
			variants: []string{"f " + longer + ` "1"`, "d " + longer + "/", "l " + longer + " -> x", "h " + longer + " => f", "f " + longer + `/x "1" as=gnu`},
			wantErr:  []string{`entry "` + longer, "256 bytes", "at most 255"}},
		{num: 33, name: "a path of 4095 bytes", layers: []string{at4095}, want: tree4095},
		{num: 33, name: "a path of 4096 bytes", layers: []string{at4096}, want: tree4096},
		{num: 33, name: "a path of 5000 bytes", layers: []string{at5000}, want: tree5000},
		{num: 33, name: "a target that is too long is refused", variants: []string{target(4096), target(65000), target(4096) + " as=gnu"},
			wantErr: []string{`entry "s"`, "target", "at most 4095"}},
		{num: 33, name: "long names and long targets in GNU's form", layers: []string{
			"l " + longDir + "/s -> " + strings.Repeat("t/", 100) + " as=gnu\nf next \"1\" as=gnu"},
			want: "d " + word(strings.Repeat("k", 60)) + " mtime=0\nd " + word(longDir) + " mtime=0\nl " + word(longDir+"/s") + " -> " + word(strings.Repeat("t/", 100)) + "\nf next \"1\""},
		{num: 33, name: "prefix and name of ustar, both full", layers: []string{"f " + split + ` "1" as=ustar`},
			want: "d " + word(strings.Repeat("p", 155)) + " mtime=0\nf " + word(split) + ` "1"`},
		{num: 33, name: "GNU's long name goes before a PAX path, as in docker and containerd",
			layers: []string{"f " + strings.Repeat("g", 150) + ` "1" as=gnu pax:path=pax`}, want: "f " + word(strings.Repeat("g", 150)) + ` "1"`},
	}
	for _, n := range []int{100, 101, 4095} {
		all = append(all, report{num: 33, name: fmt.Sprintf("a target of %d bytes", n), variants: []string{target(n), target(n) + " as=gnu"}, want: "l s -> " + word(strings.Repeat("t", n))})
	}
	return all
}

// attributeReports are about times, modes and devices.
func attributeReports(t testing.TB) []report {
	return []report{
		{num: 32, name: "a header that promises what does not come", raw: [][]byte{cut(t, `f a "" claim=100`)}, wantErr: []string{`entry "a"`, "truncated"}},
		{num: 34, name: "times are kept as they are", layers: []string{`f a "" mtime=0
				f b "" mtime=-1
				f c "" mtime=-1.5
				f d "" mtime=253402300800
				f e "" mtime=8589934592 as=gnu
				f f "" mtime=-9223372036854775808
				f g "" mtime=-9223372036854775808 as=gnu
				f h "" mtime=1700000000.123456789
				f i "" mtime=-1 as=gnu
				f j "" mtime=9223372036854775807
				l l -> x mtime=-62135596800`},
			want: `f a "" mtime=0
				f b "" mtime=-1
				f c "" mtime=-2+500000000
				f d "" mtime=253402300800
				f e "" mtime=8589934592
				f f "" mtime=-9223372036854775808
				f g "" mtime=-9223372036854775808
				f h "" mtime=1700000000+123456789
				f i "" mtime=-1
				f j "" mtime=9223372036854775807
				l l -> x mtime=-62135596800`},
		{num: 34, name: "a time that is none is refused", variants: []string{`f a "" pax:mtime=yesterday`, `f a "" pax:mtime=1.x`}, wantErr: []string{"invalid tar header"}},
		{num: 34, name: "a directory's time is that of its last entry", layers: []string{"d d/ mtime=4\nf d/early \"\"\nd d/ mtime=5\nf d/x \"\"\nd d/sub/", `f d/.wh.x ""`},
			want: "d d mtime=5\nf d/early \"\"\nd d/sub"},

		{num: 35, name: "times of files, directories and symlinks", layers: []string{"f m.py \"x = 1\" mtime=1600000001\nd __pycache__/ mtime=1600000002.000000001\nl s -> m.py mtime=1600000003.999999999"},
			want: "d __pycache__ mtime=1600000002+1\nf m.py \"x = 1\" mtime=1600000001\nl s -> m.py mtime=1600000003+999999999"},

		{num: 36, name: "setuid, setgid and sticky", layers: []string{`f a "" mode=04755
				f b "" mode=02755
				f c "" mode=06711
				f d "" mode=01644
				f e "" mode=0
				d f/ mode=01777
				d g/ mode=02775
				d h/ mode=03770
				l i -> x mode=0777
				l j -> x mode=0644
				f k "" mode=0100755
				f l "" mode=04755 uid=5 gid=6`},
			want: `f a "" mode=04755
				f b "" mode=02755
				f c "" mode=06711
				f d "" mode=01644
				f e "" mode=0
				d f mode=01777
				d g mode=02775
				d h mode=03770
				l i -> x
				l j -> x
				f k "" mode=0755
				f l "" mode=04755 uid=5 gid=6`},

		{num: 37, name: "device numbers", layers: []string{"b dev/sda 8,1\nc dev/null 1,3\nc dev/big 4095,1048575\nc dev/minor256 10,256\np fifo"},
			want: "d dev mtime=0\nc dev/big 4095,1048575\nc dev/minor256 10,256\nc dev/null 1,3\nb dev/sda 8,1\np fifo"},
		{num: 37, name: "device numbers that Linux does not have are refused", variants: []string{"c dev/x 4096,1", "b dev/x 1,1048576", "c dev/x 1,4294967296 as=gnu"},
			wantErr: []string{`entry "dev/x"`, "device number"}},
		{num: 37, name: "an unknown type is refused", variants: []string{`f a/socket "" type=Z`, `f a/socket "" type=s`, `f a/socket "" type=D`},
			wantErr: []string{`entry "a/socket"`, "tar type"}},
	}
}

// emptyReports are about nothing to store, and ids.
func emptyReports() []report {
	zeros := make([]byte, 1024)
	return []report{
		{num: 39, name: "(a) only empty files", layers: []string{"d d/\nf d/a \"\"\nf d/b \"\"\nf d/c \"\""}, want: "d d\nf d/a \"\"\nf d/b \"\"\nf d/c \"\""},
		{num: 39, name: "(b) a layer of end blocks", raw: [][]byte{zeros, zeros[:512], {}}, want: ""},
		{num: 39, name: "(b) a layer of end blocks on another", layers: []string{`f a "1"`}, raw: [][]byte{zeros}, want: `f a "1"`},
		{num: 39, name: "(d) all content is deleted", layers: []string{"d d/\nf d/a \"1\"", `f .wh.d ""`}, want: ""},
		{num: 39, name: "(e) the root alone", layers: []string{"d ./"}, want: `d ""`},
	}
}
