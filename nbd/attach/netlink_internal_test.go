package attach

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

const testFamily = 0x21

// nlMessage is a message as a kernel sends it.
func nlMessage(typ uint16, seq uint32, body ...byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, 0)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, body...)
	return append(b, make([]byte, aligned(len(b))-len(b))...)
}

// nlDone is what ends an answer, with 0 or an error number.
func nlDone(seq uint32, errno unix.Errno) []byte {
	return nlMessage(unix.NLMSG_ERROR, seq, binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno)))...)
}

func TestNetlinkAnswers(t *testing.T) {
	index := attrUint32(nbdAttrIndex, 7)
	reply := nlMessage(testFamily, 5, slices.Concat([]byte{nbdConnect, 1, 0, 0}, attrString(nbdAttrBackend, "x"), index)...)
	for name, tc := range map[string]struct {
		datagram []byte
		done     bool
		err      error // nil, or anything that is not nil for errAny
		index    uint32
	}{
		"an answer and its end":        {slices.Concat(reply, nlDone(5, 0)), true, nil, 7},
		"an answer, its end to come":   {reply, false, nil, 7},
		"no more than done":            {nlDone(5, 0), true, nil, 0},
		"an error":                     {nlDone(5, unix.ENOENT), true, unix.ENOENT, 0},
		"another command's":            {nlDone(4, unix.ENOENT), false, nil, 0},
		"a length beyond the datagram": {reply[:len(reply)-4], false, errAny, 0},
		"a length below the header's":  {make([]byte, unix.SizeofNlMsghdr), false, errAny, 0},
		"nothing":                      {nil, false, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			g := &genl{family: testFamily, seq: 5}
			var answer []byte
			done, err := g.messages(tc.datagram, &answer)
			if done != tc.done || (err != nil) != (tc.err != nil) || tc.err != errAny && !errors.Is(err, tc.err) {
				t.Errorf("done %t, %v; want %t, %v", done, err, tc.done, tc.err)
			}
			got, err := attrOf(answer, nbdAttrIndex, 4)
			if (err == nil) != (tc.index != 0) {
				t.Fatalf("index: %v", err)
			}
			if err == nil && binary.NativeEndian.Uint32(got) != tc.index {
				t.Errorf("index is %d, want %d", binary.NativeEndian.Uint32(got), tc.index)
			}
		})
	}
}

var errAny = errors.New("any")

// TestNetlinkAttributes pins the bytes: a length that counts the header, and
// padding that it does not count.
func TestNetlinkAttributes(t *testing.T) {
	got := attrString(nbdAttrBackend, "ab")
	want := binary.NativeEndian.AppendUint16(nil, 7)
	want = binary.NativeEndian.AppendUint16(want, nbdAttrBackend)
	want = append(want, 'a', 'b', 0, 0)
	if !bytes.Equal(got, want) {
		t.Errorf("attribute is %x, want %x", got, want)
	}
	if _, err := attrOf(attrUint64(nbdAttrIndex, 1), nbdAttrIndex, 4); err == nil {
		t.Error("an attribute of another size is taken")
	}
}

// FuzzNetlink feeds arbitrary bytes as a kernel's answer.
func FuzzNetlink(f *testing.F) {
	f.Add(slices.Concat(nlMessage(testFamily, 5, slices.Concat([]byte{1, 1, 0, 0}, attrUint32(nbdAttrIndex, 3))...), nlDone(5, 0)))
	f.Add(nlDone(5, unix.EBUSY))
	f.Fuzz(func(t *testing.T, b []byte) {
		g := &genl{family: testFamily, seq: 5}
		var answer []byte
		if _, err := g.messages(b, &answer); err != nil {
			return
		}
		if v, err := attrOf(answer, nbdAttrIndex, 4); err == nil && len(v) != 4 {
			t.Errorf("index of %d bytes", len(v))
		}
	})
}

// TestNetlinkFindsAFamily asks this kernel for the one that every kernel has.
func TestNetlinkFindsAFamily(t *testing.T) {
	g, err := openGenl("nlctrl")
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	if g.family != unix.GENL_ID_CTRL {
		t.Errorf("the controller is family %#x, want %#x", g.family, unix.GENL_ID_CTRL)
	}
	if _, err := openGenl("quarry-none"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a family that is none: %v, want ENOENT", err)
	}
}

// TestBackendsTellFoldersApart shows that a backend names one folder, whatever
// its path, and fits what the kernel prints it into.
func TestBackendsTellFoldersApart(t *testing.T) {
	a, b := folder(t.TempDir()), folder(t.TempDir())
	ofA, errA := backendOf(a)
	ofB, errB := backendOf(b)
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	if ofA.folder == ofB.folder {
		t.Errorf("two folders have one backend: %q", ofA.folder)
	}
	if !isBackend(ofA.String()) || len(ofA.String()) > 2048 || len(ofA.folder)+len(ofA.rest) != len(ofA.String()) {
		t.Errorf("backend is %q", ofA)
	}
	if _, err := backendOf(folder("/nowhere")); err == nil {
		t.Error("a folder that is not there has a backend")
	}
}
