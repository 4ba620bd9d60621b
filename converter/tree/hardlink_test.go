package tree_test

import (
	"strings"
	"testing"
)

func TestHardLinks(t *testing.T) { runMerge(t, hardLinkCases) }

var hardLinkCases = []mergeCase{
	{
		name:   "bug 13: a link source whited out later leaves the other names",
		layers: []string{"f A data\nh B => A\nh C => A", `f .wh.A ""`},
		want:   "f B \"data\"\nh C => B",
	},
	{
		name:   "bug 13: the directory of a link source whited out later",
		layers: []string{"d d\nf d/A data\nh B => d/A\nh C => d/A", `f .wh.d ""`},
		want:   "f B \"data\"\nh C => B",
	},
	{
		name:     "bug 15: a link to a file of a lower layer keeps that file's attributes",
		layers:   []string{"d base\nf base/x \"v1\" mode=0600 uid=7 user.k=1", "d top"},
		variants: []string{"h top/y => base/x", "h top/y => /base/x", "h top/y => ./base/x", "h top/y => top/../base//x"},
		want:     "d base\nf base/x \"v1\" mode=0600 uid=7 user.k=1\nd top\nh top/y => base/x",
	},
	{
		name:     "bug 15: a link to a file that the layer whites out is refused by name",
		layers:   []string{"d base\nf base/x \"v1\""},
		variants: []string{"f base/.wh.x \"\"\nh top/y => base/x", "h top/y => base/x\nf base/.wh.x \"\""},
		wantErr:  `layer 2: entry "top/y": hard link to "base/x": no such file any more: the same layer removes it`,
	},
	{
		name:     "a link to a file in a directory that the layer hides or whites out is refused by name",
		layers:   []string{"d base\nd base/d\nf base/d/x \"v1\""},
		variants: []string{"f base/.wh..wh..opq \"\"\nh y => base/d/x", "f base/.wh.d \"\"\nh y => base/d/x", "f .wh..wh..opq \"\"\nh y => base/d/x", "f base/d/.wh..wh..opq \"\"\nh y => base/d/x"},
		wantErr:  `layer 2: entry "y": hard link to "base/d/x": no such file any more: the same layer removes it`,
	},
	{
		name:     "bug 15: a link to nothing is refused by name",
		layers:   []string{"d base"},
		variants: []string{"h top/y => no/such", "h top/y => base/such", "h top/y => base/x/y"},
		wantErr:  `entry "top/y": hard link to`,
	},
	{
		name:     "bug 15: a link to a directory is refused by name",
		layers:   []string{"d base"},
		variants: []string{"h top/y => base", "h top/y => /", "h top/y => ./", `h top/y => ""`},
		wantErr:  "it is a directory",
	},
	{
		name:   "bug 17: symlinks, fifos and devices can have several names",
		layers: []string{"l b/sym -> /etc/hosts\nh c/sym => b/sym\np f1\nh f2 => f1\nc n1 1,3\nh n2 => n1\nb s1 8,1\nh s2 => s1", "f other \"1\""},
		want: `d b mtime=0
				l b/sym -> /etc/hosts
				d c mtime=0
				h c/sym => b/sym
				p f1
				h f2 => f1
				c n1 1,3
				h n2 => n1
				f other "1"
				b s1 8,1
				h s2 => s1`,
	},
	{
		name:   "bug 18: three names in three directories stay one file over layers",
		layers: []string{"d d1\nd d2\nd d3\nf d1/a \"" + strings.Repeat("x", 9000) + "\"\nh d2/b => d1/a\nh d3/c => d1/a", "d d4\nf d4/z \"\""},
		want:   "d d1\nf d1/a \"" + strings.Repeat("x", 9000) + "\"\nd d2\nh d2/b => d1/a\nd d3\nh d3/c => d1/a\nd d4\nf d4/z \"\"",
	},
	{
		name: "bug 19: parents without entries are made, those that exist keep their attributes",
		layers: []string{"d bin mode=0700 uid=9 mtime=5", `f bin/app.repo_mapping "m"
				f bin/app "a"
				f bin/app.runfiles/_main/main.go "g"
				h bin/app.runfiles/_repo_mapping => bin/app.repo_mapping
				h bin/app.runfiles/_main/app_/app => bin/app`},
		want: `d bin mode=0700 uid=9 mtime=5
				f bin/app "a"
				f bin/app.repo_mapping "m"
				d bin/app.runfiles mtime=0
				d bin/app.runfiles/_main mtime=0
				d bin/app.runfiles/_main/app_ mtime=0
				h bin/app.runfiles/_main/app_/app => bin/app
				f bin/app.runfiles/_main/main.go "g"
				h bin/app.runfiles/_repo_mapping => bin/app.repo_mapping`,
	},
	{
		name:   "bug 19: a late entry of a directory gives it attributes and keeps what it holds",
		layers: []string{"f bin/app \"a\"\nd bin mode=0711"},
		want:   "d bin mode=0711\nf bin/app \"a\"",
	},
	{
		name:   "bug 25: the names of a file share one set of xattrs, the last entry's value wins",
		layers: []string{"f a \"1\" user.x=1 user.y=1\nh b => a user.y=2 user.z=2"},
		want:   "f a \"1\" user.x=1 user.y=2 user.z=2\nh b => a",
	},
	{
		name:   "a link to a symlink is the symlink, a parent that is one is followed",
		layers: []string{"d d\nf d/f \"1\"\nl s -> d\nh t => s\nh u => s/f"},
		want:   "d d\nf d/f \"1\"\nl s -> d\nh t => s\nh u => d/f",
	},
	{
		name:   "a link over a directory takes its place",
		layers: []string{"f a \"1\"\nd b\nf b/c \"2\"", "h b => a"},
		want:   "f a \"1\"\nh b => a",
	},
	{
		name:   "a file replaced after it was linked leaves the link with the old content",
		layers: []string{"f a \"1\"\nh b => a\nf a \"2\""},
		want:   "f a \"2\"\nf b \"1\"",
	},
}
