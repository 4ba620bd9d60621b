package inflate_test

import (
	"bufio"
	"bytes"
	"compress/flate"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"quarry/internal/inflate"
)

// sample has n bytes of every kind: text, code, runs and noise.
func sample(t testing.TB, n int) []byte {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	var b bytes.Buffer
	for b.Len() < n {
		switch r.IntN(4) {
		case 0:
			at := r.IntN(len(code) - 50000)
			b.Write(code[at : at+r.IntN(50000)])
		case 1:
			b.WriteString(strings.Repeat("all work and no play "[r.IntN(20):], r.IntN(300)))
		case 2:
			b.Write(bytes.Repeat([]byte{byte(r.Uint32())}, r.IntN(100000)))
		case 3:
			for range r.IntN(20000) {
				b.WriteByte(byte(r.Uint32()))
			}
		}
	}
	return b.Bytes()[:n]
}

func deflate(t testing.TB, p []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, level)
	if err == nil {
		_, err = w.Write(p)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var levels = []int{flate.NoCompression, flate.BestSpeed, 6, flate.BestCompression, flate.HuffmanOnly}

func TestReadsEveryLevel(t *testing.T) {
	for _, n := range []int{0, 1, 20, 70000, 3 << 20} {
		want := sample(t, n)
		for _, level := range levels {
			for name, through := range map[string]func(io.Reader) io.Reader{
				"whole": func(r io.Reader) io.Reader { return r }, "bytes": iotest.OneByteReader, "halves": iotest.HalfReader, "early EOF": iotest.DataErrReader,
			} {
				src := bufio.NewReader(through(io.MultiReader(bytes.NewReader(deflate(t, want, level)), strings.NewReader("what follows"))))
				r := inflate.NewReader(src)
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%d bytes, level %d, %s: got %d bytes, error %v", n, level, name, len(got), err)
				}
				if rest, err := io.ReadAll(src); err != nil || string(rest) != "what follows" {
					t.Fatalf("%d bytes, level %d, %s: %q, %v is left of the source", n, level, name, rest, err)
				}
			}
		}
	}
}

func TestCutOff(t *testing.T) {
	want := sample(t, 20000)
	for _, level := range levels {
		b := deflate(t, want, level)
		for n := 0; n < len(b); n += 1 + n/100 {
			got, err := io.ReadAll(inflate.NewReader(bufio.NewReader(bytes.NewReader(b[:n]))))
			if !errors.Is(err, io.ErrUnexpectedEOF) || !bytes.HasPrefix(want, got) {
				t.Fatalf("level %d, %d of %d bytes: got %d bytes, error %v", level, n, len(b), len(got), err)
			}
			broken := errors.New("broken")
			src := io.MultiReader(bytes.NewReader(b[:n]), iotest.ErrReader(broken))
			if _, err := io.ReadAll(inflate.NewReader(bufio.NewReader(src))); !errors.Is(err, broken) {
				t.Fatalf("level %d, source that breaks at byte %d of %d: got error %v, want %v", level, n, len(b), err, broken)
			}
		}
	}
}

func TestReset(t *testing.T) {
	r := inflate.NewReader(bufio.NewReader(strings.NewReader("\xff")))
	if _, err := io.ReadAll(r); !errors.Is(err, inflate.ErrCorrupt) {
		t.Errorf("block of no type: got error %v, want %v", err, inflate.ErrCorrupt)
	}
	r.Reset(bufio.NewReader(bytes.NewReader(deflate(t, []byte("again"), 6))))
	if got, err := io.ReadAll(r); err != nil || string(got) != "again" {
		t.Errorf("got %q, %v", got, err)
	}
}

// compare reads b with this package and with the standard library: both or none
// must take it, and both give the same bytes. Before an error one may give more
// than the other, which looks further ahead.
func compare(t *testing.T, b []byte) {
	t.Helper()
	const limit = 4 << 20
	std, mine := bytes.NewReader(b), bytes.NewReader(b)
	src := bufio.NewReader(mine)
	want, wantErr := io.ReadAll(io.LimitReader(flate.NewReader(std), limit))
	got, err := io.ReadAll(io.LimitReader(inflate.NewReader(src), limit))
	if (err == nil) != (wantErr == nil) {
		t.Fatalf("got error %v after %d bytes, the standard library %v after %d", err, len(got), wantErr, len(want))
	}
	if n := min(len(got), len(want)); err == nil && len(got) != len(want) || !bytes.Equal(got[:n], want[:n]) {
		t.Fatalf("got other bytes than the standard library: %d and %d, error %v", len(got), len(want), err)
	}
	if rest := mine.Len() + src.Buffered(); err == nil && len(got) < limit && rest != std.Len() {
		t.Fatalf("%d bytes are left of the source, the standard library leaves %d", rest, std.Len())
	}
}

func TestDamaged(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, level := range levels {
		whole := deflate(t, sample(t, 60000), level)
		for range 300 {
			b := bytes.Clone(whole)
			for range 1 + r.IntN(3) {
				b[r.IntN(min(len(b), 1+r.IntN(len(b))))] ^= 1 << r.IntN(8)
			}
			compare(t, b)
		}
	}
}

func FuzzReader(f *testing.F) {
	for _, level := range levels {
		f.Add(deflate(f, sample(f, 300), level))
	}
	f.Fuzz(compare)
}

func BenchmarkReader(b *testing.B) {
	plain := sample(b, 16<<20)
	p := deflate(b, plain, 6)
	b.SetBytes(int64(len(plain)))
	for b.Loop() {
		io.Copy(io.Discard, inflate.NewReader(bufio.NewReader(bytes.NewReader(p))))
	}
}
