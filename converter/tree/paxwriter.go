package tree

import (
	"bufio"
	"fmt"
	"path"
	"strconv"
	"strings"

	"quarry/rafs"
)

const (
	tarBlock  = 512
	tarRecord = 20 * tarBlock // what tar programs pad an archive to
)

// Type flags of tar entries.
const (
	flagReg     = '0'
	flagLink    = '1'
	flagSymlink = '2'
	flagChar    = '3'
	flagBlock   = '4'
	flagDir     = '5'
	flagFIFO    = '6'
	flagPAX     = 'x'
)

// paxHeader describes one entry of a PAX tar.
type paxHeader struct {
	name string
	flag byte
	link string // path of the first name, or the symlink's target
	size int64
	*rafs.Inode
}

// paxWriter writes a PAX tar. archive/tar's Writer cannot be used: it takes
// the first second of year 1, which images do carry, for no time at all, and
// has no way to write an xattr whose name holds "=".
type paxWriter struct {
	w *bufio.Writer
	n int64 // bytes written
}

func (p *paxWriter) write(b []byte) error {
	n, err := p.w.Write(b)
	p.n += int64(n)
	return err
}

// pad fills up with zeros to a multiple of size.
func (p *paxWriter) pad(size int64) error {
	return p.write(make([]byte, (size-p.n%size)%size))
}

// close ends the archive. Without it a reader sees that the archive is cut.
func (p *paxWriter) close() error {
	if err := p.write(make([]byte, 2*tarBlock)); err != nil {
		return err
	}
	if err := p.pad(tarRecord); err != nil {
		return err
	}
	return p.w.Flush()
}

// header writes the header of an entry; size bytes of content and pad follow.
func (p *paxWriter) header(h *paxHeader) error {
	if records := h.records(); records != "" {
		x := &paxHeader{
			name: "PaxHeaders/" + path.Base(h.name), flag: flagPAX, size: int64(len(records)),
			Inode: &rafs.Inode{Mode: 0o644},
		}
		if err := p.write(x.block()); err != nil {
			return err
		}
		if err := p.write([]byte(records)); err != nil {
			return err
		}
		if err := p.pad(tarBlock); err != nil {
			return err
		}
	}
	return p.write(h.block())
}

// field is a number's place in a ustar header: octal digits and a NUL.
type field struct{ off, len int }

var (
	fieldMode  = field{100, 8}
	fieldUID   = field{108, 8}
	fieldGID   = field{116, 8}
	fieldSize  = field{124, 12}
	fieldMtime = field{136, 12}
	fieldMajor = field{329, 8}
	fieldMinor = field{337, 8}
)

const (
	ustarName   = 100 // bytes for a name, and for a link
	fieldSum    = 148
	fieldFlag   = 156
	fieldLink   = 157
	fieldMagic  = 257
	ustarMagic  = "ustar\x0000"
	checksumLen = 8
)

func (f field) holds(v int64) bool { return v >= 0 && v < 1<<(3*(f.len-1)) }

// put writes v, or 0 when a PAX record has to say it.
func (f field) put(b []byte, v int64) {
	if !f.holds(v) {
		v = 0
	}
	copy(b[f.off:], fmt.Sprintf("%0*o", f.len-1, v))
}

// block returns the ustar header. Names too long for it are cut; the PAX
// record before it has the whole.
func (h *paxHeader) block() []byte {
	b := make([]byte, tarBlock)
	copy(b[:ustarName], h.name)
	fieldMode.put(b, int64(h.Mode&rafs.ModePerm))
	fieldUID.put(b, int64(h.UID))
	fieldGID.put(b, int64(h.GID))
	fieldSize.put(b, h.size)
	fieldMtime.put(b, h.Mtime)
	b[fieldFlag] = h.flag
	copy(b[fieldLink:fieldLink+ustarName], h.link)
	copy(b[fieldMagic:], ustarMagic)
	fieldMajor.put(b, int64(h.Major()))
	fieldMinor.put(b, int64(h.Minor()))
	copy(b[fieldSum:], strings.Repeat(" ", checksumLen))
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[fieldSum:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// records returns the PAX records for what the ustar header cannot say.
func (h *paxHeader) records() string {
	var b strings.Builder
	if len(h.name) > ustarName {
		addRecord(&b, "path", h.name)
	}
	if len(h.link) > ustarName {
		addRecord(&b, "linkpath", h.link)
	}
	if !fieldSize.holds(h.size) {
		addRecord(&b, "size", strconv.FormatInt(h.size, 10))
	}
	if !fieldUID.holds(int64(h.UID)) {
		addRecord(&b, "uid", strconv.FormatInt(int64(h.UID), 10))
	}
	if !fieldGID.holds(int64(h.GID)) {
		addRecord(&b, "gid", strconv.FormatInt(int64(h.GID), 10))
	}
	if h.MtimeNsec != 0 || !fieldMtime.holds(h.Mtime) {
		addRecord(&b, "mtime", paxTime(h.Mtime, h.MtimeNsec))
	}
	if h.flag != flagLink { // the first name of a file has told them
		for _, x := range h.Xattrs {
			addRecord(&b, "SCHILY.xattr."+xattrKey(x.Name), string(x.Value))
		}
	}
	return b.String()
}

// addRecord appends "length key=value\n", where the length counts itself.
func addRecord(b *strings.Builder, key, value string) {
	rest := len(" =\n") + len(key) + len(value)
	size := rest + len(strconv.Itoa(rest))
	size = rest + len(strconv.Itoa(size)) // the length's own digits can add one
	fmt.Fprintf(b, "%d %s=%s\n", size, key, value)
}

// paxTime returns a time as a decimal number of seconds. The nanoseconds count
// upwards from the second, also before 1970, while the decimals of a negative
// number count away from zero.
func paxTime(sec int64, nsec uint32) string {
	if nsec == 0 {
		return strconv.FormatInt(sec, 10)
	}
	sign := ""
	if sec < 0 {
		sign, sec, nsec = "-", -(sec + 1), 1e9-nsec
	}
	return strings.TrimRight(fmt.Sprintf("%s%d.%09d", sign, sec, nsec), "0")
}

// xattrKey writes an xattr's name as GNU tar does when the plain name would be
// read as another: a record's key ends at its first "=".
func xattrKey(name string) string {
	if !strings.Contains(name, "=") && !strings.Contains(name, "%3D") && !strings.Contains(name, "%25") {
		return name
	}
	return strings.NewReplacer("%", "%25", "=", "%3D").Replace(name)
}
