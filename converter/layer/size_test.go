package layer_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"quarry/converter/layer"
	"quarry/internal/testimage"
	"quarry/store/chunk"
)

// sparse10 makes an archive with a sparse file in form 1.0 that is one hole.
func sparse10(t *testing.T, size int64) []byte {
	t.Helper()
	m := make([]byte, 512)
	copy(m, fmt.Sprintf("1\n%d\n0\n", size))
	e := testimage.File("f", string(m))
	e.PAXRecords = map[string]string{
		"GNX.sparse.major": "1", "GNX.sparse.minor": "0", "GNX.sparse.name": "f", "GNX.sparse.realsize": fmt.Sprint(size),
	}
	return bytes.ReplaceAll(testimage.Tar(t, e, testimage.File("end", "intact")), []byte("GNX.sparse"), []byte("GNU.sparse"))
}

// A size near the largest number must not become a small or negative one.
func TestAnEnormousSizeIsRefusedByName(t *testing.T) {
	for _, size := range []int64{math.MaxInt64, math.MaxInt64 - 200_000, math.MaxInt64 - 300_000, 1 << 62} {
		for name, blob := range map[string][]byte{"1.0": sparse10(t, size), "0.1": sparsePAX(t, size, "", "")} {
			for _, s := range []uint32{chunk.MinSize, chunk.DefaultSize, chunk.MaxSize} {
				_, _, err := readWith(t, blob, s, layer.Limits{})
				wantError(t, err, `entry "f"`, fmt.Sprintf("file of %d bytes", size), "limit MaxChunks")
			}
			if _, _, err := readWith(t, blob, testChunk, layer.Limits{MaxChunks: 1}); err == nil {
				t.Errorf("%s: a file of %d bytes is within one chunk", name, size)
			}
		}
	}
}

// What entries take in memory is told before it is taken: raising MaxChunks alone
// gives a kilobyte no terabytes.
func TestMemoryIsChargedBeforeItIsTaken(t *testing.T) {
	full := errors.New("full")
	var left int64
	read := func(blob []byte, budget int64) error {
		left = budget
		_, err := layer.Read(t.Context(), bytes.NewReader(blob), describe(blob), &chunks{}, layer.Config{
			ChunkSize: testChunk, Limits: layer.Limits{MaxChunks: 1 << 61},
			Charge: func(n int64) error {
				if n > left {
					return full
				}
				left -= n
				return nil
			},
		})
		return err
	}
	if err := read(sparse10(t, math.MaxInt64), 1<<32); !errors.Is(err, full) || left != 1<<32 {
		t.Errorf("a hole of 2^63-1 bytes: %v", err)
	}
	two := testimage.Tar(t, testimage.Symlink("name", "target"), testimage.File("f", "xyz"))
	if err := read(two, 1<<20); err != nil {
		t.Fatal(err)
	}
	need := 1<<20 - left
	if err := read(two, need); err != nil {
		t.Errorf("exactly what is needed: %v", err)
	}
	if err := read(two, need-1); !errors.Is(err, full) {
		t.Errorf("one byte less: %v", err)
	}
}

// Of what is longer than is read, the place, the bound and the entry before are told.
func TestHeadersThatAreTooLongAreNamed(t *testing.T) {
	first := testimage.Tar(t, testimage.File("first", "x"))
	first = first[:len(first)-1024] // without the end
	long := func(flag byte, name string) []byte {
		e := testimage.Tar(t, testimage.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Format: tar.FormatGNU}, Body: strings.Repeat("n", 1<<20+1)})
		sum := int64(0)
		e[156] = flag
		copy(e[148:], "        ")
		for _, c := range e[:512] {
			sum += int64(c)
		}
		copy(e[148:], fmt.Sprintf("%06o\x00 ", sum))
		return append(bytes.Clone(first), e...)
	}
	for name, blob := range map[string][]byte{
		"a long name":   long(tar.TypeGNULongName, "././@LongLink"),
		"a long target": long(tar.TypeGNULongLink, "././@LongLink"),
		"PAX records":   long(tar.TypeXHeader, "x"),
	} {
		_, _, err := read(t, blob)
		t.Log(name, err)
		wantError(t, err, `after entry "first"`, "1 MiB", "MaxHeader")
	}
}
