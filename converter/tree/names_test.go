package tree_test

import (
	"strings"
	"testing"
)

func TestTypeChangesAndNames(t *testing.T) { runMerge(t, nameCases) }

// longName is the longest name there can be.
var longName = strings.Repeat("n", 255)

var nameCases = []mergeCase{
	{
		name:   "bug 20: a symlink in place of a directory drops the old content",
		layers: []string{"d lib\nf lib/a \"1\"\nd lib/sub\nf lib/sub/b \"2\"\nd usr\nd usr/lib\nf usr/lib/c \"3\"", "l lib -> usr/lib"},
		want:   "l lib -> usr/lib\nd usr\nd usr/lib\nf usr/lib/c \"3\"",
	},
	{
		name:   "bug 20: a directory in place of a symlink starts empty",
		layers: []string{"l lib -> usr/lib\nd usr\nd usr/lib\nf usr/lib/c \"3\"", "d lib\nf lib/new n"},
		want:   "d lib\nf lib/new \"n\"\nd usr\nd usr/lib\nf usr/lib/c \"3\"",
	},
	{
		name:   "bug 20: file to directory, directory to file, directory to fifo",
		layers: []string{"f a \"1\"\nd b\nf b/x \"2\"\nd c\nf c/x \"2\"", "d a\nf a/y \"3\"\nf b \"4\"\np c"},
		want:   "d a\nf a/y \"3\"\nf b \"4\"\np c",
	},
	{
		name:   "bug 21: a lower file as parent is replaced, as under an overlay",
		layers: []string{"f p file\nl q -> r\nd r", "f p/x \"1\"\nf q/y \"2\""},
		want:   "d p mtime=0\nf p/x \"1\"\nl q -> r\nd r\nf r/y \"2\"",
	},
	{
		name:     "bug 21: a file of the same layer as parent is refused by name",
		layers:   []string{"f p file"},
		variants: []string{"f p file\nf p/x \"1\"", "p p\nd p/x", "d r\nf r/f \"1\"\nl q -> r/f\nf q/y/x \"1\""},
		wantErr:  "the path leads through a file that is not a directory",
	},
	{
		name:     "bug 21: a lower file as parent behind a symlink is refused by name",
		layers:   []string{"f f \"1\"\nl q -> f"},
		variants: []string{`f q/x "1"`},
		wantErr:  `layer 2: entry "q/x": the path leads through a file that is not a directory`,
	},
	{
		name:   "bug 22: names and links stay inside the root",
		layers: []string{"d etc\nf etc/passwd image", "f ../../evil \"1\"\nf /abs \"2\"\nf a/../../evil3 \"3\"\nl x -> /etc\nf x/cron \"4\"\nl up -> ../../..\nf up/evil5 \"5\"\nh hl => ../../../etc/passwd\nh hl2 => x/passwd"},
		want: `f abs "2"
				d etc
				f etc/cron "4"
				f etc/passwd "image"
				f evil "1"
				f evil3 "3"
				f evil5 "5"
				h hl => etc/passwd
				h hl2 => etc/passwd
				l up -> ../../..
				l x -> /etc`,
	},
	{
		name:    "bug 22: a link to what only the host has is refused by name",
		layers:  []string{"l x -> /etc\nh hl2 => x/passwd"},
		wantErr: `entry "hl2": hard link to "x/passwd"`,
	},
	{
		name:     "bug 22: names without a file name or with a NUL are refused",
		variants: []string{`f "" "1"`, `f . "1"`, `f .. "1"`, `f / "1"`, `f "a\x00b" "1"`, `h x => "a\x00b"`, `l x -> "a\x00b"`, `l "" -> x`, `h "" => x`},
		wantErr:  "layer 1: entry",
	},
	{
		name:    "bug 22: a loop of symlinks is refused by name",
		layers:  []string{"l a -> b\nl b -> a\nf a/x \"1\""},
		wantErr: `entry "a/x": the path leads through more than 255 symlinks`,
	},
	{
		name:     "bug 23: the root's attributes are kept by layers without an entry for it",
		variants: []string{"d ./ mode=0711 uid=3 gid=4 mtime=1234567890", "d / mode=0711 uid=3 gid=4 mtime=1234567890", "d . mode=0711 uid=3 gid=4 mtime=1234567890", `d "" mode=0711 uid=3 gid=4 mtime=1234567890`},
		want:     `d "" mode=0711 uid=3 gid=4 mtime=1234567890`,
	},
	{
		name:   "bug 24: of two entries for one path the last one counts",
		layers: []string{"f foo \"1\"\nf foo \"2\""},
		want:   "f foo \"2\"",
	},
	{
		name:   "bug 24: a directory given twice keeps its content and takes the last attributes",
		layers: []string{"d x\nf x/a \"1\"\nd x mode=0700"},
		want:   "d x mode=0700\nf x/a \"1\"",
	},
	{
		name:   "bug 24: a file and then a directory of one path",
		layers: []string{"f foo \"1\"\nd foo\nf foo/b \"2\""},
		want:   "d foo\nf foo/b \"2\"",
	},
	{
		name:   "bug 24: a file and then a link to itself keeps the content",
		layers: []string{"f foo \"1\"\nh foo => foo"},
		want:   "f foo \"1\"",
	},
	{
		name:   "bug 24: spellings of one path are one path",
		layers: []string{"f a//b \"1\"\nf ./a/b \"2\"\nd a/\nf a/./b/ \"3\""},
		want:   "d a\nf a/b \"3\"",
	},
	{
		name:   "bug 32: names are bytes",
		layers: []string{`f "caf\xe9" "1"`, `f "n\nl\\\x01\x7f" "2"`, `f "e\u0301" "3"`, `f "\u00e9" "4"`, `l s -> "\xff"`},
		want:   "f \"caf\\xe9\" \"1\"\nf e\u0301 \"3\"\nf \"n\\nl\\\\\\x01\\x7f\" \"2\"\nl s -> \"\\xff\"\nf \u00e9 \"4\"",
	},
	{
		name:   "bug 33: names of 255 bytes and targets of 4095 are possible",
		layers: []string{"d " + longName + "\nf " + longName + "/" + longName + " \"1\"\nl s -> " + strings.Repeat("t", 4095)},
		want:   "d " + longName + "\nf " + longName + "/" + longName + " \"1\"\nl s -> " + strings.Repeat("t", 4095),
	},
	{
		name:     "bug 33: longer ones are refused by name",
		variants: []string{"f " + longName + "n \"1\"", "d " + longName + "n/a", "l n" + longName + " -> x", "f a \"1\"\nh " + longName + "h => a", "l s -> " + strings.Repeat("t", 4096), "l s -> " + longName + "n\nd s/x"},
		wantErr:  "bytes, at most",
	},
	{
		name:     "bug 33: a symlink without a target is refused by name",
		variants: []string{`l s -> ""`},
		wantErr:  `entry "s": the symlink has no target`,
	},
	{
		name:   "bug 34: times are kept to the nanosecond, and a directory's come from its entry",
		layers: []string{"f a \"\" mtime=0\nf b \"\" mtime=-1\nf c \"\" mtime=-2+500000000\nf d \"\" mtime=253402300800\nf e \"\" mtime=-9223372036854775808\nd g mtime=5\nf g/x \"\"", `f g/.wh.x ""`},
		want:   "f a \"\" mtime=0\nf b \"\" mtime=-1\nf c \"\" mtime=-2+500000000\nf d \"\" mtime=253402300800\nf e \"\" mtime=-9223372036854775808\nd g mtime=5",
	},
	{
		name:     "bug 34: a time that is none is refused by name",
		variants: []string{`f a "" mtime=1+1000000000`},
		wantErr:  `entry "a": the mtime has 1000000000 nanoseconds`,
	},
	{
		name:   "bug 36: the low 12 bits of the mode are kept, symlinks have 0777",
		layers: []string{"f a \"\" mode=04755\nf b \"\" mode=02755\nf c \"\" mode=06711\nf d \"\" mode=01644\nf e \"\" mode=0\nf f \"\" mode=0100755\nd g mode=01777\nd h mode=02775\nd i mode=03770\nl l -> x mode=0644"},
		want:   "f a \"\" mode=04755\nf b \"\" mode=02755\nf c \"\" mode=06711\nf d \"\" mode=01644\nf e \"\" mode=0\nf f \"\" mode=0755\nd g mode=01777\nd h mode=02775\nd i mode=03770\nl l -> x",
	},
	{
		name:   "bug 37: device numbers are exact",
		layers: []string{"b dev/sda 8,1\nc dev/null 1,3\nc dev/big 4095,1048575\nc dev/minor256 10,256\np fifo"},
		want:   "d dev mtime=0\nc dev/big 4095,1048575\nc dev/minor256 10,256\nc dev/null 1,3\nb dev/sda 8,1\np fifo",
	},
	{
		name:     "bug 37: device numbers that Linux cannot hold are refused by name",
		variants: []string{"c dev/x 4096,0", "b dev/x 0,1048576"},
		wantErr:  `entry "dev/x": the device number`,
	},
	{
		name:   "bug 39: empty files, empty layers and an image whose content is all deleted",
		layers: []string{"d d\nf d/a \"\"", "", "", `f .wh.d ""`},
		want:   "",
	},
	{
		name:   "a dangling symlink as parent makes what it leads to",
		layers: []string{"l q -> nope/../r/s\nf q/y \"1\""},
		want:   "l q -> nope/../r/s\nd r mtime=0\nd r/s mtime=0\nf r/s/y \"1\"",
	},
	{
		name:    "a symlink cannot lead a parent to a whiteout's name",
		layers:  []string{"l q -> .wh.x\nf q/y \"1\""},
		wantErr: `entry "q/y": the path leads to ".wh.x"`,
	},
}
