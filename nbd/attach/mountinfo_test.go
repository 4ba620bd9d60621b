package attach_test

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
)

func TestAMountTableIsReadAsTheKernelWritesIt(t *testing.T) {
	table := `30 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw
31 30 7:300 /sub /a\040b\134040\012 ro - erofs /dev/loop\0113 ro
a line of another form
32 30 0:x /  /c rw - tmpfs tmpfs rw
33 30 0:44 / /d rw - overlay overlay rw,lowerdir=` + strings.Repeat("/x:", 100_000) + "\n"
	var got []attach.MountEntry
	if err := attach.Mounts(strings.NewReader(table), func(m attach.MountEntry) { got = append(got, m) }); err != nil {
		t.Fatal(err)
	}
	want := []attach.MountEntry{
		{Point: "/", Device: unix.Mkdev(8, 1), Source: "/dev/sda1"},
		{Point: "/a b\\040\n", Device: unix.Mkdev(7, 300), Source: "/dev/loop\t3"},
		{Point: "/d", Device: unix.Mkdev(0, 44), Source: "overlay"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
