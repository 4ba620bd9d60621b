package converter_test

import "strings"

// orders returns every order of lines, each as the text of a layer.
func orders(lines ...string) (all []string) {
	if len(lines) == 0 {
		return []string{""}
	}
	for i := range lines {
		rest := append(append([]string{}, lines[:i]...), lines[i+1:]...)
		for _, o := range orders(rest...) {
			all = append(all, strings.TrimSpace(lines[i]+"\n"+o))
		}
	}
	return all
}

// whiteoutReports are about whiteouts and opaque directories.
func whiteoutReports() []report {
	doc := `d etc/
		f etc/passwd "x"`
	return []report{
		{num: 1, name: "a bare whiteout prefix in a directory is refused", layers: []string{doc},
			variants: []string{`f etc/.wh. ""`}, wantErr: []string{`layer 2: entry "etc/.wh."`, "names no file"}},
		{num: 1, name: "a bare whiteout prefix at the root is refused", layers: []string{doc},
			variants: orders(`f .wh. ""`, `d etc/`, `f etc/config.txt "y"`), wantErr: []string{`layer 2: entry ".wh."`, "names no file"}},
		{num: 1, name: "whiteouts of . and .. are refused", layers: []string{doc},
			variants: []string{`f etc/.wh.. ""`, `f etc/.wh... ""`}, wantErr: []string{`layer 2: entry "etc/.wh..`, "names no file"}},

		{num: 3, name: "an opaque marker hides everything below", layers: []string{"d a/\nd a/b/\nf a/b/foo \"1\""},
			variants: orders(`d a/`, `f a/.wh..wh..opq ""`), want: `d a`},
		{num: 3, name: "an opaque marker leaves what its layer adds", layers: []string{"d a/\nd a/b/\nf a/b/foo \"1\""},
			variants: orders(`d a/`, `f a/.wh..wh..opq ""`, `f a/new "2"`),
			want:     "d a\nf a/new \"2\""},

		{num: 4, name: "an opaque marker is applied first, wherever it stands", layers: []string{"d d/\nl d/x -> ../t/x\nf d/old \"o\""},
			variants: orders(`d d/`, `f d/.wh..wh..opq ""`, `l d/x -> ../t/x2`, `f d/new "n"`),
			want:     "d d\nf d/new \"n\"\nl d/x -> ../t/x2"},
		{num: 4, name: "a whiteout is applied first, wherever it stands", layers: []string{"d d/\nf d/old \"o\""},
			variants: orders(`f d/.wh.old ""`, `f d/old "NEW"`), want: "d d\nf d/old \"NEW\""},

		{num: 7, name: "a directory is whited out, and so is what was in it", layers: []string{"d test/\nf test/test \"x\""},
			variants: orders(`f .wh.test ""`, `f test/.wh.test ""`), want: ""},

		{num: 8, name: "what is hidden was not there", layers: []string{`d etc/`},
			variants: []string{`f var/cache/apt/archives/.wh..wh..opq ""
				f etc/.wh.nope ""
				d new/
				f new/.wh..wh..opq ""
				f new/a "1"`},
			want: `d etc
				d new
				f new/a "1"
				d var mtime=0
				d var/cache mtime=0
				d var/cache/apt mtime=0
				d var/cache/apt/archives mtime=0`},

		{num: 9, name: "AUFS bookkeeping is not in the tree, and links into it are copies", layers: []string{`d .wh..wh.plnk/
				f .wh..wh.plnk/292.1436735 "data"
				d .wh..wh.orph/
				f .wh..wh.aufs ""
				d bin/
				f bin/sh "s"
				h bin/sh2 => .wh..wh.plnk/292.1436735`},
			want: "d bin\nf bin/sh \"s\"\nf bin/sh2 \"data\""},
		{num: 9, name: "a link to bookkeeping that is not there is refused", layers: []string{`f .wh..wh.plnk/1.2 "x"`},
			variants: []string{"h sh => .wh..wh.plnk/1.2"}, wantErr: []string{`layer 2: entry "sh"`, `".wh..wh.plnk/1.2"`, "no such file"}},

		{num: 10, name: "a whiteout inside what the layer makes a symlink", layers: []string{"d a/\nf a/a \"1\""},
			variants: orders(`f a/.wh.a ""`, `d ./ mtime=0`, `l a -> b`, `d b/`), want: "l a -> b\nd b"},
		{num: 10, name: "a whiteout inside what the layer makes a file", layers: []string{"d a/\nf a/a \"1\""},
			variants: orders(`f a/.wh.a ""`, `d ./ mtime=0`, `f a "file"`, `d b/`), want: "f a \"file\"\nd b"},

		{num: 12, name: "markers of the lowest layer are not in the tree, a device 0:0 is", layers: []string{`d d/
				f d/.wh.gone ""
				f d/.wh..wh..opq ""
				f d/a "1"
				c d/null0 0,0
				h d/null1 => d/null0`},
			want: "d d\nf d/a \"1\"\nc d/null0 0,0 nlink=2\nh d/null1 => d/null0"},
		{num: 12, name: "a device 0:0 hides nothing", layers: []string{"d d/\nf d/a \"1\"\nf d/b \"2\"", "c d/a 0,0"},
			want: "d d\nc d/a 0,0\nf d/b \"2\""},
	}
}

// linkReports are about hard links.
func linkReports() []report {
	five := strings.Repeat("five MiB that do not repeat", 1)
	for len(five) < 5<<20 {
		five += five[len(five)/3:] + five[:7]
	}
	five = five[:5<<20]
	bazel := `f bin/app.repo_mapping "m"
		f bin/app "` + strings.Repeat("app", 1573026/3) + `" mode=0755
		f bin/app.runfiles/_main/main.go "package main"
		h bin/app.runfiles/_repo_mapping => bin/app.repo_mapping
		h bin/app.runfiles/_main/app_/app => bin/app`
	bazelTree := `f bin/app ` + content(strings.Repeat("app", 1573026/3)) + ` mode=0755 nlink=2
		f bin/app.repo_mapping "m" nlink=2
		d bin/app.runfiles mtime=0
		d bin/app.runfiles/_main mtime=0
		d bin/app.runfiles/_main/app_ mtime=0
		h bin/app.runfiles/_main/app_/app => bin/app
		f bin/app.runfiles/_main/main.go "package main"
		h bin/app.runfiles/_repo_mapping => bin/app.repo_mapping`
	source := `f base/x "v1" mode=0600 uid=7 user.k=1`
	return []report{
		{num: 13, name: "the source of links is whited out", layers: []string{"f A \"data\"\nh B => A\nh C => A", `f .wh.A ""`},
			want: "f B \"data\" nlink=2\nh C => B"},
		{num: 13, name: "the directory of the source of links is whited out", layers: []string{"d d/\nf d/A \"data\"\nh B => d/A\nh C => d/A", `f .wh.d ""`},
			want: "f B \"data\" nlink=2\nh C => B"},

		{num: 15, name: "a link to a file of a lower layer", layers: []string{source},
			variants: []string{"h top/y => base/x", "h top/y => /base/x", "h top/y => ./base/x"},
			want: `d base mtime=0
				f base/x "v1" mode=0600 uid=7 user.k=1 nlink=2
				d top mtime=0
				h top/y => base/x`},
		{num: 15, name: "a link to a lower file that the layer whites out is refused", layers: []string{source},
			variants: orders(`f base/.wh.x ""`, `h top/y => base/x`), wantErr: []string{`layer 2: entry "top/y"`, `hard link to "base/x"`, "no such file"}},
		{num: 15, name: "a link to nothing is refused", layers: []string{source},
			variants: []string{"h top/y => no/such"}, wantErr: []string{`layer 2: entry "top/y"`, `hard link to "no/such"`, "no such file"}},
		{num: 15, name: "a link to a directory is refused", layers: []string{source},
			variants: []string{"h top/y => base"}, wantErr: []string{`layer 2: entry "top/y"`, `hard link to "base"`, "it is a directory"}},

		{num: 17, name: "symlinks, fifos and devices have several names", layers: []string{`l b/sym -> /etc/hosts
				h c/sym => b/sym
				p f1
				h f2 => f1
				c n1 1,3
				h n2 => n1`, `f other "1"`},
			want: `d b mtime=0
				l b/sym -> /etc/hosts nlink=2
				d c mtime=0
				h c/sym => b/sym
				p f1 nlink=2
				h f2 => f1
				c n1 1,3 nlink=2
				h n2 => n1
				f other "1"`},

		{num: 18, name: "three names stay one file over layers", layers: []string{`f d1/a "` + five + `"
				h d2/b => d1/a
				h d3/c => d1/a`, `f d4/z ""`},
			want: `d d1 mtime=0
				f d1/a ` + content(five) + ` nlink=3
				d d2 mtime=0
				h d2/b => d1/a
				d d3 mtime=0
				h d3/c => d1/a
				d d4 mtime=0
				f d4/z ""`},

		{num: 19, name: "parents without entries are made", layers: []string{bazel}, want: "d bin mtime=0\n" + bazelTree},
		{num: 19, name: "parents without entries keep their attributes", layers: []string{"d bin/ mode=0700 uid=9 mtime=5", bazel},
			want: "d bin mode=0700 uid=9 mtime=5\n" + bazelTree},
		{num: 19, name: "the entry of a parent comes last", layers: []string{bazel + "\nd bin/ mode=0711"},
			want: "d bin mode=0711\n" + bazelTree},
	}
}
