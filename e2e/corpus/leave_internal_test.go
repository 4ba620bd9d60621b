package main

import (
	"slices"
	"testing"
)

func TestImageMountsAreFoundInTheMountTable(t *testing.T) {
	const table = "27 1 254:0 / / rw,relatime - ext4 /dev/root rw\n" +
		"76 27 0:43 / /w/x/fuse ro - fuse.quarry quarry ro\n" +
		"77 27 7:3 / /w/x/root ro shared:3 - erofs /dev/loop3 ro\n" +
		"78 27 7:3 / /mnt/a\\040b ro - erofs /dev/loop3 ro\n" +
		"79 27 0:44 / /home/erofs ro - fuse.sshfs erofs ro\n"
	if got, want := imageMounts(table), []string{"/w/x/fuse", "/w/x/root", "/mnt/a b"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
