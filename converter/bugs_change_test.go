package converter_test

// changeReports are about type changes, symlinked parents, traversal.
func changeReports() []report {
	return []report{
		{num: 20, name: "a symlink in place of a directory", layers: []string{`d lib/
				f lib/a "1"
				d lib/sub/
				f lib/sub/b "2"
				d usr/lib/
				f usr/lib/c "3"`, "l lib -> usr/lib"},
			want: "l lib -> usr/lib\nd usr mtime=0\nd usr/lib\nf usr/lib/c \"3\""},
		{num: 20, name: "a directory in place of a symlink", layers: []string{"l lib -> usr/lib\nd usr/lib/\nf usr/lib/c \"3\"", "d lib/\nf lib/new \"n\""},
			want: "d lib\nf lib/new \"n\"\nd usr mtime=0\nd usr/lib\nf usr/lib/c \"3\""},
		{num: 20, name: "a directory in place of a file", layers: []string{`f x "1"`, "d x/\nf x/y \"2\""}, want: "d x\nf x/y \"2\""},
		{num: 20, name: "a file in place of a directory", layers: []string{"d x/\nf x/y \"2\"", `f x "1"`}, want: `f x "1"`},
		{num: 20, name: "a fifo in place of a directory", layers: []string{"d x/\nf x/y \"2\"", `p x`}, want: `p x`},

		{num: 21, name: "parents that are a lower file and a symlink", layers: []string{"f p \"file\"\nl q -> r\nd r/", "f p/x \"1\"\nf q/y \"2\""},
			want: "d p mtime=0\nf p/x \"1\"\nl q -> r\nd r\nf r/y \"2\""},
		{num: 21, name: "a parent that is a file of the same layer is refused",
			variants: []string{"f p \"file\"\nf p/x \"1\""}, wantErr: []string{`layer 1: entry "p/x"`, "not a directory"}},
		{num: 21, name: "merged usr", layers: []string{"l lib -> usr/lib\nd usr/lib/", `f lib/x "1"`},
			want: "l lib -> usr/lib\nd usr mtime=0\nd usr/lib\nf usr/lib/x \"1\""},

		{num: 22, name: "names above the root end at the root",
			variants: []string{`f ../../evil "1"`, `f a/../../evil "1"`, `f /evil "1"`, `f /../evil "1"`}, want: `f evil "1"`},
		{num: 22, name: "symlinks above the root end at the root", layers: []string{`l x -> /etc
				f x/cron "4"
				l up -> ../../..
				f up/evil "5"`},
			want: "d etc mtime=0\nf etc/cron \"4\"\nf evil \"5\"\nl up -> ../../..\nl x -> /etc"},
		{num: 22, name: "hard links above the root end at the root", layers: []string{"f etc/passwd \"image\"\nl x -> /etc",
			"h hl => ../../../etc/passwd\nh hl2 => x/passwd"},
			want: "d etc mtime=0\nf etc/passwd \"image\" nlink=3\nh hl => etc/passwd\nh hl2 => etc/passwd\nl x -> /etc"},
		{num: 22, name: "a hard link to what only the host has is refused",
			variants: []string{"h hl => ../../../etc/passwd", "h hl => /etc/passwd"}, wantErr: []string{`entry "hl"`, `etc/passwd"`, "no such file"}},
		{num: 22, name: "a hard link through a symlink to what only the host has is refused", layers: []string{"l x -> /etc"},
			variants: []string{"h hl2 => x/passwd"}, wantErr: []string{`entry "hl2"`, `"x/passwd"`, "no such file"}},
		{num: 22, name: "a name with a NUL is refused, where a header can hold one",
			variants: []string{`f a "1" "pax:path=a\x00b"`}, wantErr: []string{"invalid tar header"}},
		{num: 22, name: "a file without a name is refused",
			variants: []string{`f "" "1"`}, wantErr: []string{`entry ""`, "no name"}},
		{num: 22, name: "a file in the root's place is refused",
			variants: []string{`f . "1"`, `f ./ "1"`, `f / "1"`, `l . -> x`, `p ./.`}, wantErr: []string{"entry \"", "root"}},
		{num: 22, name: "a file in the place of the root's parent is refused",
			variants: []string{`f .. "1"`, `l a/../.. -> x`}, wantErr: []string{"entry \"", "root"}},
	}
}

// rootReports are about the root's entry and duplicates.
func rootReports() []report {
	attrs := " mode=0711 uid=3 gid=4 mtime=1234567890"
	return []report{
		{num: 23, name: "the root's entry", variants: []string{"d ./" + attrs + "\nf ./a \"1\"", "d /" + attrs + "\nf a \"1\"",
			"d ." + attrs + "\nf a \"1\"", `d ""` + attrs + "\nf a \"1\""},
			want: `d "" mode=0711 uid=3 gid=4 mtime=1234567890
				f a "1"`},
		{num: 23, name: "the root's attributes are kept by layers without an entry", layers: []string{"d ./" + attrs + "\nf ./a \"1\"", `f b "2"`},
			want: `d "" mode=0711 uid=3 gid=4 mtime=1234567890
				f a "1"
				f b "2"`},
		{num: 23, name: "a root without an entry is 0755 0:0 and of 1970", layers: []string{`f a "1"`}, want: `f a "1"`},

		{num: 24, name: "of two files the last counts", layers: []string{"f foo \"1\"\nf foo \"2\""}, want: `f foo "2"`},
		{num: 24, name: "of two entries of a directory the last counts, and it keeps what it holds", layers: []string{"d x/\nf x/a \"1\"\nd x/ mode=0700"},
			want: "d x mode=0700\nf x/a \"1\""},
		{num: 24, name: "a directory after a file", layers: []string{"f foo \"1\"\nd foo/\nf foo/b \"2\""}, want: "d foo\nf foo/b \"2\""},
		{num: 24, name: "a second copy as a link to itself", layers: []string{"f foo \"1\"\nh foo => foo"}, want: `f foo "1"`},
		{num: 24, name: "spellings of one path", layers: []string{"f a//b \"1\"\nf ./a/b \"2\""}, want: "d a mtime=0\nf a/b \"2\""},
		{num: 24, name: "a directory with and without its slash", layers: []string{"d x/\nf x/a \"1\"\nd x mode=0700"}, want: "d x mode=0700\nf x/a \"1\""},
	}
}
