package s3_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/s3"
	"quarry/store/bucket/s3/s3test"
)

// value returns the sum of a metric's series that have all of the labels, as name=value;
// of a histogram, the number of what it saw.
func value(t testing.TB, b *s3.Bucket, name string, labels ...string) (sum float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(b.Collectors()...)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			has := ""
			for _, l := range m.GetLabel() {
				has += " " + l.GetName() + "=" + l.GetValue()
			}
			all := true
			for _, l := range labels {
				all = all && strings.Contains(has+" ", " "+l+" ")
			}
			if all {
				sum += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// Every request is counted once, by what it asked and how it ended.
func TestRequestsAreCounted(t *testing.T) {
	r := newRig(t)
	count := func(name string, labels ...string) float64 { return value(t, r.faulty, name, labels...) }
	buckettest.Put(t, r.faulty, "a", make([]byte, 1000))
	for _, c := range []struct {
		fault   s3test.Fault
		outcome string
		again   float64
	}{
		{s3test.None, "ok", 0},
		{s3test.SlowDown, "slow_down", 1},
		{s3test.FailApplied, "error", 1},
		{s3test.Truncate, "ok", 1}, // the body says it, not the answer's head
	} {
		failed, retries := count("quarry_s3_requests_total", "op=GetObject", "outcome="+c.outcome), count("quarry_s3_retries_total")
		all, received := count("quarry_s3_requests_total", "op=GetObject"), count("quarry_s3_received_bytes_total")
		r.proxy.Rule(s3test.First(1, "GetObject", c.fault))
		if err := r.faulty.ReadAt(t.Context(), "a", make([]byte, 1000), 0); err != nil {
			t.Fatal(err)
		}
		if got := count("quarry_s3_requests_total", "op=GetObject") - all; got != 1+c.again {
			t.Errorf("%s: %v requests, want %v", c.fault, got, 1+c.again)
		}
		if got := count("quarry_s3_requests_total", "op=GetObject", "outcome="+c.outcome) - failed; got < 1 {
			t.Errorf("%s: no request has outcome %s", c.fault, c.outcome)
		}
		if got := count("quarry_s3_retries_total") - retries; got != c.again {
			t.Errorf("%s: %v retries, want %v", c.fault, got, c.again)
		}
		if got := count("quarry_s3_received_bytes_total") - received; got < 1000 {
			t.Errorf("%s: %v bytes received for 1000", c.fault, got)
		}
	}
	r.proxy.Rule(s3test.First(1, "PutObject", s3test.Reset))
	buckettest.Put(t, r.faulty, "a", make([]byte, 1000))
	if got := count("quarry_s3_requests_total", "op=PutObject", "outcome=broken"); got != 1 {
		t.Errorf("%v requests whose connection was reset, want 1", got)
	}
	r.proxy.Rule(nil)
	if _, err := r.faulty.Stat(t.Context(), "b"); !errors.Is(err, bucket.ErrNotFound) {
		t.Fatal(err)
	}
	if got := count("quarry_s3_requests_total", "op=HeadObject", "outcome=not_found"); got != 1 {
		t.Errorf("%v requests for an object that is not there, want 1", got)
	}
	if err := r.faulty.Append(t.Context(), 1, []byte("entry")); err != nil {
		t.Fatal(err)
	}
	if err := r.faulty.Append(t.Context(), 1, []byte("other")); !errors.Is(err, bucket.ErrTaken) {
		t.Fatal(err)
	}
	if got := count("quarry_s3_requests_total", "op=PutObject", "outcome=taken"); got != 1 {
		t.Errorf("%v appends that were refused, want 1", got)
	}
	if got := count("quarry_s3_sent_bytes_total"); got < 1000 {
		t.Errorf("%v bytes sent", got)
	}
	if got, want := count("quarry_s3_request_seconds"), count("quarry_s3_requests_total")-count("quarry_s3_requests_total", "outcome=broken"); got != want {
		t.Errorf("%v times for %v answers", got, want)
	}
}
