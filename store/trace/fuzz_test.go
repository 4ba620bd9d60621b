package trace_test

import (
	"bytes"
	"errors"
	"testing"

	"quarry/store/trace"
)

func FuzzDecode(f *testing.F) {
	f.Add(encode(f, aRecord(f)))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := trace.Decode(b)
		if err != nil {
			if !known(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		if again, err := r.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x encodes to %x, %v", b, again, err)
		}
	})
}

func FuzzStream(f *testing.F) {
	f.Add(aStream(f))
	f.Add(streamWith(aPart(255, 0, 0, 0)))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, coming, chunks, err := readStream(bytes.NewReader(b))
		if err != nil {
			if !known(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		var out bytes.Buffer
		w := trace.NewWriter(&out)
		if list != nil {
			err = w.List(list, coming)
		}
		for _, c := range chunks {
			err = errors.Join(err, w.Chunk(c))
			c.Plain(nil) // does not panic and takes no more than the chunk
		}
		if err := errors.Join(err, w.Close()); err != nil || !bytes.Equal(out.Bytes(), b) {
			t.Fatalf("%x encodes to %x, %v", b, out.Bytes(), err)
		}
	})
}
