package testimage

import (
	"archive/tar"
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// tarBlock is what tar pads everything to.
const tarBlock = 512

// EndMarker ends a tar archive.
var EndMarker = make([]byte, 2*tarBlock)

// RawTar writes one entry in the PAX format just as it stands, right or wrong:
// archive/tar's writer refuses or mends much of what a hostile layer can hold.
// There is no end marker, so entries can be joined.
func RawTar(e Entry) []byte {
	records := map[string]string{
		"path": e.Name, "linkpath": e.Linkname,
		"uid": strconv.Itoa(e.Uid), "gid": strconv.Itoa(e.Gid), "size": strconv.Itoa(len(e.Body)),
		"mtime": paxTime(e),
	}
	maps.DeleteFunc(records, func(_, v string) bool { return v == "" })
	maps.Copy(records, e.PAXRecords)
	var pax bytes.Buffer
	for _, k := range slices.Sorted(maps.Keys(records)) {
		pax.WriteString(paxRecord(k, records[k]))
	}
	var b bytes.Buffer
	b.Write(ustarHeader(Entry{Header: tar.Header{Typeflag: tar.TypeXHeader, Name: "pax"}}, pax.Len()))
	b.Write(padded(pax.Bytes()))
	e.Name, e.Linkname = cut(e.Name), cut(e.Linkname)
	b.Write(ustarHeader(e, len(e.Body)))
	b.Write(padded([]byte(e.Body)))
	return b.Bytes()
}

// paxTime writes seconds with their fraction, which PAX counts away from zero.
func paxTime(e Entry) string {
	sec, nsec := e.ModTime.Unix(), int64(e.ModTime.Nanosecond())
	sign := ""
	if sec < 0 && nsec > 0 {
		sec, nsec = sec+1, 1e9-nsec
		if sec == 0 {
			sign = "-"
		}
	}
	if nsec == 0 {
		return strconv.FormatInt(sec, 10)
	}
	return fmt.Sprintf("%s%d.%09d", sign, sec, nsec)
}

// paxRecord is "LENGTH KEY=VALUE\n" with the length of all of it.
func paxRecord(k, v string) string {
	rest := " " + k + "=" + v + "\n"
	n := len(rest) + 1
	for n != len(strconv.Itoa(n))+len(rest) {
		n = len(strconv.Itoa(n)) + len(rest)
	}
	return strconv.Itoa(n) + rest
}

func cut(s string) string { return s[:min(len(s), 99)] }

// ustarHeader is a block with what PAX records cannot say; they replace its
// other fields.
func ustarHeader(e Entry, size int) []byte {
	h := make([]byte, tarBlock)
	copy(h[0:], e.Name)
	copy(h[100:], fmt.Sprintf("%07o", e.Mode&0o7777777))
	copy(h[108:], fmt.Sprintf("%07o", 0))
	copy(h[116:], fmt.Sprintf("%07o", 0))
	copy(h[124:], fmt.Sprintf("%011o", size))
	copy(h[136:], fmt.Sprintf("%011o", 0))
	copy(h[148:], "        ")
	h[156] = e.Typeflag
	copy(h[157:], e.Linkname)
	copy(h[257:], "ustar\x0000")
	copy(h[329:], fmt.Sprintf("%07o", e.Devmajor&0o7777777))
	copy(h[337:], fmt.Sprintf("%07o", e.Devminor&0o7777777))
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return h
}

func padded(p []byte) []byte {
	return append(p, make([]byte, -len(p)&(tarBlock-1))...)
}
