package tree_test

import (
	"testing"
)

func TestWhiteouts(t *testing.T) { runMerge(t, whiteoutCases) }

// The numbers in names are those of the bug reports the cases come from.
var whiteoutCases = []mergeCase{
	{
		name:    "bug 1: a bare whiteout prefix in a directory is refused by name",
		layers:  []string{`d etc` + "\n" + `f etc/passwd "x"`, `f etc/.wh. ""`},
		wantErr: `layer 2: entry "etc/.wh.": the whiteout names no file`,
	},
	{
		name:    "bug 1: a bare whiteout prefix at the root is refused by name",
		layers:  []string{`d etc`, "f .wh. \"\"\nd etc\nf etc/config.txt \"y\""},
		wantErr: `entry ".wh.": the whiteout names no file`,
	},
	{
		name:     "bug 1: whiteouts of . and .. are refused",
		layers:   []string{`d etc`},
		variants: []string{`f etc/.wh.. ""`, `f etc/.wh... ""`},
		wantErr:  "the whiteout names no file",
	},
	{
		name:     "bug 3: an opaque marker hides all lower content",
		layers:   []string{"d a\nd a/b\nf a/b/foo \"1\""},
		variants: []string{"d a\nf a/.wh..wh..opq \"\"", "f a/.wh..wh..opq \"\"\nd a", `f a/.wh..wh..opq ""`},
		want:     "d a",
	},
	{
		name:   "bug 3: an opaque marker leaves the layer's own content",
		layers: []string{"d a\nd a/b\nf a/b/foo \"1\"", "d a\nf a/new \"2\"\nf a/.wh..wh..opq \"\""},
		want:   "d a\nf a/new \"2\"",
	},
	{
		name:   "bug 4: the order of an opaque marker and its siblings means nothing",
		layers: []string{"d d\nl d/x -> ../t/x\nf d/old \"o\""},
		variants: []string{
			"d d\nf d/.wh..wh..opq \"\"\nl d/x -> ../t/x2\nf d/new \"n\"",
			"d d\nl d/x -> ../t/x2\nf d/.wh..wh..opq \"\"\nf d/new \"n\"",
			"l d/x -> ../t/x2\nf d/new \"n\"\nf d/.wh..wh..opq \"\"\nd d",
		},
		want: "d d\nf d/new \"n\"\nl d/x -> ../t/x2",
	},
	{
		name:     "bug 4: a whiteout never hides an entry of its own layer",
		layers:   []string{"d d\nf d/old \"o\""},
		variants: []string{"f d/.wh.old \"\"\nf d/old NEW", "f d/old NEW\nf d/.wh.old \"\""},
		want:     "d d\nf d/old \"NEW\"",
	},
	{
		name:     "bug 7: a whiteout of a directory and whiteouts inside it leave nothing",
		layers:   []string{"d test\nf test/test \"x\""},
		variants: []string{"f .wh.test \"\"\nf test/.wh.test \"\"", "f test/.wh.test \"\"\nf .wh.test \"\""},
		want:     "",
	},
	{
		name:   "bug 8: markers whose target does not exist do nothing, their directory is made",
		layers: []string{"d etc", "f var/cache/apt/archives/.wh..wh..opq \"\"\nf etc/.wh.nope \"\"\nd new\nf new/.wh..wh..opq \"\"\nf new/a \"1\""},
		want:   "d etc\nd new\nf new/a \"1\"\nd var mtime=0\nd var/cache mtime=0\nd var/cache/apt mtime=0\nd var/cache/apt/archives mtime=0",
	},
	{
		name: "bug 8: a directory made for a marker is hidden by the layer's other markers",
		variants: []string{
			"f .wh.a \"\"\nf a/b/.wh.c \"\"", "f a/b/.wh.c \"\"\nf .wh.a \"\"",
			"f .wh..wh..opq \"\"\nf a/b/.wh..wh..opq \"\"", "f a/b/.wh..wh..opq \"\"\nf .wh..wh..opq \"\"",
		},
		want: "",
	},
	{
		name: "bug 9: AUFS bookkeeping is hidden and links into plnk are copies of what is there",
		layers: []string{`d .wh..wh.plnk
				f .wh..wh.plnk/292.1436735 "data" mode=0755
				d .wh..wh.orph
				f .wh..wh.orph/x "y"
				f .wh..wh.aufs ""
				d bin
				f bin/sh "s"
				h bin/sh2 => .wh..wh.plnk/292.1436735
				h bin/sh3 => /.wh..wh.plnk/292.1436735`},
		want: "d bin\nf bin/sh \"s\"\nf bin/sh2 \"data\" mode=0755\nf bin/sh3 \"data\" mode=0755",
	},
	{
		name:    "bug 9: a link into plnk with nothing there is refused by name",
		layers:  []string{"f .wh..wh.plnk/1.2 \"data\"", "h sh => .wh..wh.plnk/1.2"},
		wantErr: `layer 2: entry "sh": hard link to ".wh..wh.plnk/1.2"`,
	},
	{
		name:   "bug 10: a whiteout inside what the layer turns into a symlink",
		layers: []string{"d a\nf a/a \"1\""},
		variants: []string{
			"f a/.wh.a \"\"\nd ./ mtime=0\nl a -> b\nd b",
			"l a -> b\nf a/.wh.a \"\"\nd ./ mtime=0\nd b",
		},
		want: "l a -> b\nd b",
	},
	{
		name:     "bug 10: a whiteout inside what the layer turns into a file",
		layers:   []string{"d a\nf a/a \"1\""},
		variants: []string{"f a/.wh.a \"\"\nf a file", "f a file\nf a/.wh.a \"\""},
		want:     "f a \"file\"",
	},
	{
		name:   "bug 12: markers of the lowest layer are hidden, a 0:0 device is a device",
		layers: []string{"d d\nf d/.wh.gone \"\"\nf d/.wh..wh..opq \"\"\nf d/a \"1\"\nc d/null0 0,0\nh d/null1 => d/null0"},
		want:   "d d\nf d/a \"1\"\nc d/null0 0,0\nh d/null1 => d/null0",
	},
	{
		name:   "bug 12: a 0:0 device hides nothing",
		layers: []string{"d d\nd d/x\nf d/x/y \"1\"", "c d/x 0,0"},
		want:   "d d\nc d/x 0,0",
	},
	{
		name:   "an opaque marker at the root hides everything",
		layers: []string{"d ./ mode=0711\nd a\nf a/b \"1\"", "f .wh..wh..opq \"\"\nf c \"2\""},
		want:   "d \"\" mode=0711\nf c \"2\"",
	},
	{
		name:     "markers are markers whatever their type",
		layers:   []string{"f a \"1\"\nf b \"2\""},
		variants: []string{"d .wh.a", "l .wh.a -> x", "c .wh.a 0,0", "h .wh.a => b"},
		want:     "f b \"2\"",
	},
	{
		name:    "a path through a whiteout is refused by name",
		layers:  []string{`f a/.wh.x/b "1"`},
		wantErr: `entry "a/.wh.x/b": the path leads through a whiteout`,
	},
	{
		name:   "a whiteout removes a symlink, not what it leads to",
		layers: []string{"d usr\nd usr/lib\nl lib -> usr/lib", `f .wh.lib ""`},
		want:   "d usr\nd usr/lib",
	},
	{
		name:   "a whiteout below a lower symlink to a directory reaches through it",
		layers: []string{"d usr\nd usr/lib\nf usr/lib/a \"1\"\nf usr/lib/b \"2\"\nl lib -> usr/lib", `f lib/.wh.a ""`},
		want:   "l lib -> usr/lib\nd usr\nd usr/lib\nf usr/lib/b \"2\"",
	},
	{
		name:   "a marker does not reach through a symlink that the layer replaces",
		layers: []string{"d usr\nd usr/lib\nf usr/lib/a \"1\"\nl lib -> usr/lib"},
		variants: []string{
			"d lib\nf lib/.wh..wh..opq \"\"",
			"f lib/.wh..wh..opq \"\"\nd lib",
			"f lib/.wh.a \"\"\nd lib",
		},
		want: "d lib\nd usr\nd usr/lib\nf usr/lib/a \"1\"",
	},
	{
		name:     "a marker does not reach through a symlink that the layer removes",
		layers:   []string{"d usr\nf usr/a \"1\"\nl lib -> usr"},
		variants: []string{"f .wh.lib \"\"\nf lib/.wh.a \"\"", "f lib/.wh.a \"\"\nf .wh.lib \"\""},
		want:     "d usr\nf usr/a \"1\"",
	},
	{
		name:     "a marker below a file, a dangling symlink or a loop does nothing",
		layers:   []string{"f f \"1\"\nl dangling -> nowhere\nl loop -> loop\nl tofile -> f"},
		variants: []string{`f f/.wh.a ""`, `f dangling/.wh..wh..opq ""`, `f loop/.wh.a ""`, `f tofile/.wh.a ""`},
		want:     "l dangling -> nowhere\nf f \"1\"\nl loop -> loop\nl tofile -> f",
	},
	{
		name:   "a directory made anew over a whiteout does not get the old attributes",
		layers: []string{"d a mode=0700 uid=5\nf a/x \"1\"", "f a/y \"2\"\nf .wh.a \"\""},
		want:   "d a mtime=0\nf a/y \"2\"",
	},
}
