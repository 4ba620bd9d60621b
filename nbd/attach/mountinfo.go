package attach

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MountEntry is one mount of a mount table.
type MountEntry struct {
	Point  string // where it is mounted
	Device uint64 // of the file system, as stat(2) has it
	Source string // what it was mounted from
}

// maxMountLine bounds a line of a mount table: overlay options can be long.
const maxMountLine = 1 << 20

// Mounts calls each with the mounts of a table in the form of proc_pid_mountinfo(5), in
// its order. Lines of another form are left out.
func Mounts(table io.Reader, each func(MountEntry)) error {
	lines := bufio.NewScanner(table)
	lines.Buffer(nil, maxMountLine)
	for lines.Scan() {
		const deviceField, pointField, fieldsToo = 2, 4, 6
		place, kind, _ := strings.Cut(lines.Text(), " - ") // behind any number of fields
		fields, what := strings.SplitN(place, " ", fieldsToo), strings.Fields(kind)
		if len(fields) < fieldsToo || len(what) < 2 {
			continue
		}
		major, minor, _ := strings.Cut(fields[deviceField], ":")
		ma, err := strconv.ParseUint(major, 10, 32)
		if err != nil {
			continue
		}
		mi, err := strconv.ParseUint(minor, 10, 32)
		if err != nil {
			continue
		}
		each(MountEntry{Point: unescape(fields[pointField]), Device: unix.Mkdev(uint32(ma), uint32(mi)), Source: unescape(what[1])})
	}
	return lines.Err()
}

// eachMount is Mounts of this process's table.
func eachMount(each func(MountEntry)) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	return Mounts(f, each)
}

// unescape reads a path as a mount table has it, with its odd bytes in octal.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
