package nbd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
)

// FuzzRequest checks that every accepted header encodes back to itself and that
// no accepted read leaves the device.
func FuzzRequest(f *testing.F) {
	for _, q := range []request{
		{typ: cmdRead, cookie: 1, off: 4096, length: 4096},
		{typ: cmdRead, flags: cmdFlagDF, off: 1<<64 - 1, length: 1<<32 - 1},
		{typ: cmdCache, length: 1 << 31},
		{typ: cmdDisc},
	} {
		var b [requestSize]byte
		q.encode(&b)
		f.Add(b[:])
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		var in, out [requestSize]byte
		copy(in[:], p)
		q, err := decodeRequest(&in)
		if err != nil {
			return
		}
		if q.encode(&out); in != out {
			t.Errorf("%x decodes to %+v, which encodes to %x", in, q, out)
		}
		const size = 1 << 20
		if q.validate(size, true) == 0 && (q.off > size || uint64(q.length) > size-q.off) {
			t.Errorf("%+v is accepted on a device of %d bytes", q, size)
		}
		if n := chargeOf(q); q.validate(size, true) == 0 && (n < minCharge || n > MaxPayload) {
			t.Errorf("%+v is charged %d bytes", q, n)
		}
	})
}

type emptyDevice struct{}

func (emptyDevice) Size() int64                                 { return 4096 }
func (emptyDevice) ReadAt(context.Context, []byte, int64) error { return nil }

// FuzzHaggle feeds a client's bytes to the handshake: it ends with an export
// that exists or an error, and never answers with more than was asked for.
func FuzzHaggle(f *testing.F) {
	option := func(opt byte, data string) string {
		return "IHAVEOPT\x00\x00\x00" + string(opt) + "\x00\x00\x00" + string(rune(len(data))) + data
	}
	const client = "\x00\x00\x00\x03"
	f.Add([]byte(client + option(optStructuredReply, "") + option(optGo, "\x00\x00\x00\x05image\x00\x01\x00\x03")))
	f.Add([]byte(client + option(optInfo, "\x00\x00\x00\x05image\x00\x00") + option(optExportName, "image")))
	f.Add([]byte(client + option(optList, "") + option(99, "x") + option(optAbort, "")))
	f.Add([]byte("\x00\x00\x00\x01" + option(optExportName, "image")))
	s := &Server{Exports: func(_ context.Context, name string) (Device, error) {
		if name != "image" {
			return nil, ErrUnknownExport
		}
		return emptyDevice{}, nil
	}}
	f.Fuzz(func(t *testing.T, p []byte) {
		var out bytes.Buffer
		sess, err := haggle(t.Context(), &opened{srv: s}, bytes.NewReader(p), &out)
		if err == nil && (sess.name != "image" || sess.dev == nil) {
			t.Errorf("session %+v, want the export", sess)
		}
		if limit := 18 + maxOptions*(2*maxMessage); out.Len() > limit {
			t.Errorf("%d bytes of answers, at most %d expected", out.Len(), limit)
		}
	})
}

// FuzzOffer feeds a server's bytes to the client's side of the handshake.
func FuzzOffer(f *testing.F) {
	var out bytes.Buffer
	s := &Server{Exports: func(context.Context, string) (Device, error) { return emptyDevice{}, nil }}
	ask := "\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x0f\x00\x00\x00\x05image\x00\x02\x00\x01\x00\x03"
	if _, err := haggle(f.Context(), &opened{srv: s}, bytes.NewReader([]byte(ask)), &out); err != nil {
		f.Fatal(err)
	}
	f.Add(out.Bytes())
	f.Fuzz(func(t *testing.T, p []byte) {
		o, err := choose(struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(p), io.Discard}, "image")
		var refused *RefusedError
		switch {
		case err == nil && (o.size < 0 || o.maxPayload < preferredBlock || o.maxPayload > MaxPayload):
			t.Errorf("offer %+v was accepted", o)
		case errors.As(err, &refused) && len(refused.Message) > maxMessage:
			t.Errorf("a message of %d bytes was kept", len(refused.Message))
		}
	})
}
