package packed_test

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"testing"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
	"quarry/store/storetest"
)

// filed opens the store over files, see buckettest.Files.
func (d disk) filed(t *testing.T, b buckettest.Files, change ...func(*packed.Config)) *opened {
	t.Helper()
	o, err := d.tryOpen(t, b, d.bucket, d.crash().fs, change...)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// asked is what StoredRecords said of a batch.
type asked struct {
	sent    []chunk.Digest // as records
	missing []chunk.Digest // with them
	parts   int            // extents
	read    map[chunk.Digest]error
}

// askRecords asks for chunks, and reads what is sent as the records of a pack.
func (o *opened) askRecords(t *testing.T, ds []chunk.Digest) (a asked) {
	t.Helper()
	a.read = map[chunk.Digest]error{}
	send := func(r *packed.Records) error {
		a.missing, a.parts = r.Missing, len(r.Extents)
		size := int64(0)
		for _, e := range r.Extents {
			a.sent = append(a.sent, digestsIn(t, e)...)
			size += e.Size
		}
		if len(a.sent) != r.Count || size != r.Size {
			t.Errorf("%d records of %d bytes, want %d of %d", len(a.sent), size, r.Count, r.Size)
		}
		return nil
	}
	err := o.StoredRecords(t.Context(), ds, send, func(d chunk.Digest, _ packed.Stored, err error) error {
		a.read[d] = err
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(a.sent) > 0 && len(a.read) > 0 {
		t.Error("chunks were sent, and others read")
	}
	return a
}

// digestsIn returns the chunks of an extent, verified.
func digestsIn(t *testing.T, e packed.Extent) (ds []chunk.Digest) {
	t.Helper()
	b := make([]byte, e.Size)
	if _, err := e.File.ReadAt(b, e.Off); err != nil && err != io.EOF {
		t.Fatal(err)
	}
	for len(b) > 0 {
		rec, err := pack.DecodeRecordHeader(b[:pack.RecordHeaderSize], 0)
		if err != nil {
			t.Fatal(err)
		}
		b = b[pack.RecordHeaderSize:]
		p, err := pack.Decode(nil, rec.Codec, b[:rec.Stored], rec.Len)
		if err != nil || chunk.Sum(p) != rec.Digest {
			t.Fatalf("chunk %s: %v", rec.Digest, err)
		}
		ds, b = append(ds, rec.Digest), b[rec.Stored:]
	}
	return ds
}

func TestNeighboursAreSentAsRecords(t *testing.T) {
	d := newDisk()
	ps := contents(0, 40)
	first := d.open(t)
	first.put(t, ps)
	first.put(t, contents(100, 10))
	o := d.filed(t, buckettest.Files{Bucket: d.bucket}, func(c *packed.Config) { c.MinExtent = 1 })
	ds, other, missing := digests(ps), digests(contents(100, 10)), chunk.Sum([]byte("missing"))
	for name, test := range map[string]struct {
		want  []chunk.Digest
		parts int
	}{
		"all of a pack":       {ds, 1},
		"one":                 {ds[7:8], 1},
		"two runs":            {slices.Concat(ds[3:8], ds[9:12]), 2},
		"of two packs":        {slices.Concat(ds[3:8], other[2:4]), 2},
		"in no order":         {[]chunk.Digest{ds[5], ds[3], ds[4]}, 1},
		"asked for two times": {[]chunk.Digest{ds[5], ds[6], ds[5]}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var meter bucket.Meter
			a := o.askRecords(t, append(slices.Clone(test.want), missing, missing))
			unique := map[chunk.Digest]bool{}
			for _, d := range test.want {
				unique[d] = true
			}
			got := map[chunk.Digest]bool{}
			for _, d := range a.sent {
				got[d] = unique[d]
			}
			if a.parts != test.parts || len(a.sent) != len(unique) || len(got) != len(unique) || len(a.missing) != 1 {
				t.Errorf("%d extents of %d chunks, %d missing, want %d of %d", a.parts, len(a.sent), len(a.missing), test.parts, len(unique))
			}
			err := o.StoredRecords(bucket.WithMeter(t.Context(), &meter), test.want, func(r *packed.Records) error {
				if meter.Read() != r.Size {
					t.Errorf("%d bytes counted, want %d", meter.Read(), r.Size)
				}
				return errors.New("from send")
			}, nil)
			if err == nil || err.Error() != "from send" {
				t.Errorf("got error %v, want that of send", err)
			}
		})
	}
}

// What is no run of neighbours in files is read as ever.
func TestOtherBatchesAreRead(t *testing.T) {
	d := newDisk()
	big := [][]byte{storetest.Content(1, 50_000), storetest.Content(3, 50_000), storetest.Content(5, 50_000)}
	ps := slices.Concat(contents(0, 60), big)
	first := d.open(t)
	first.put(t, ps)
	for i := range 17 {
		first.put(t, [][]byte{storetest.Content(uint64(2*i+1001), 40_000)})
	}
	o := d.filed(t, buckettest.Files{Bucket: d.bucket})
	want := func(what string, sent bool, ds []chunk.Digest) {
		t.Helper()
		a := o.askRecords(t, ds)
		if (len(a.sent) > 0) != sent || len(a.sent)+len(a.read) != len(ds) {
			t.Errorf("%s: %d chunks sent and %d read of %d, want them sent: %t", what, len(a.sent), len(a.read), len(ds), sent)
		}
		for d, err := range a.read {
			if err != nil {
				t.Errorf("%s: %s: %v", what, d, err)
			}
		}
	}
	want("large neighbours", true, digests(big))
	want("one small chunk", false, digests(ps[5:6]))
	var second []chunk.Digest
	for i := 0; i < len(ps); i += 2 {
		second = append(second, chunk.Sum(ps[i]))
	}
	want("every second chunk", false, second)
	var spread []chunk.Digest
	for i := range 17 {
		spread = append(spread, chunk.Sum(storetest.Content(uint64(2*i+1001), 40_000)))
	}
	want("of 16 packs", true, spread[:16])
	want("of 17 packs", false, spread)
	want("nothing", false, nil)

	o = d.filed(t, buckettest.Files{Bucket: d.bucket, Change: func(f *os.File) error { return f.Truncate(9000) }})
	want("a pack that ends early", false, digests(big))
	o = d.filed(t, buckettest.Files{Bucket: d.bucket, Change: func(f *os.File) error { return errors.New("too many open files") }})
	want("a pack that cannot be opened", false, digests(big))
	o = first
	want("a bucket without files", false, digests(big))
}

// Files that are sent take room, and what finds none is read.
func TestFilesThatAreSentAreBounded(t *testing.T) {
	d := newDisk()
	p := storetest.Content(1, 50_000)
	d.open(t).put(t, [][]byte{p})
	o := d.filed(t, buckettest.Files{Bucket: d.bucket})
	depth, read := 0, 0
	var send func(*packed.Records) error
	fn := func(_ chunk.Digest, _ packed.Stored, err error) error { read++; return err }
	send = func(*packed.Records) error {
		depth++
		return o.StoredRecords(context.WithoutCancel(t.Context()), []chunk.Digest{chunk.Sum(p)}, send, fn)
	}
	if err := send(nil); err != nil {
		t.Fatal(err)
	}
	if depth != 1+2048 || read != 1 {
		t.Errorf("%d batches were sent at once and %d read", depth-1, read)
	}
}
