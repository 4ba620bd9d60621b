package lease_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/chunk"
	"quarry/store/lease"
)

func digest(s string) chunk.Digest { return chunk.Sum([]byte(s)) }

func mount(id string) lease.Lease {
	return lease.Lease{ID: id, Image: digest("image"), Bootstrap: digest("boot"), TTLSeconds: 30}
}

// clock is a clock that tests move.
type clock struct{ now time.Time }

func newClock() *clock { return &clock{time.Unix(1_800_000_000, 0)} }

func (c *clock) open(t *testing.T, b *mem.Bucket, node string) *lease.Table {
	t.Helper()
	table, err := lease.Open(t.Context(), lease.Config{Bucket: b, Node: node, Now: func() time.Time { return c.now }})
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// pass lets time go by as Run sees it.
func (c *clock) pass(d time.Duration, tables ...*lease.Table) {
	for ; d > 0; d -= time.Second {
		c.now = c.now.Add(time.Second)
		for _, t := range tables {
			t.Tick()
		}
	}
}

func renew(t *testing.T, table *lease.Table, l lease.Lease) {
	t.Helper()
	if err := table.Renew(t.Context(), l); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, what string, table *lease.Table, ls ...lease.Lease) {
	t.Helper()
	got, err := table.All(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(append([]lease.Lease{}, ls...), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestLeasesOutliveTheirNode(t *testing.T) {
	b, c := mem.New(), newClock()
	first := c.open(t, b, "a")
	renew(t, first, mount("1"))
	unknown := lease.Lease{ID: "2", TTLSeconds: 1}
	renew(t, first, unknown)
	again := c.open(t, b, "a")
	want(t, "after a restart", again, mount("1"), unknown)
	c.pass(lease.Slack+2*time.Second, again)
	want(t, "after the short one", again, mount("1"))
	c.pass(30*time.Second, again)
	want(t, "after both", again)
}

func TestALeaseThatIsRenewedStays(t *testing.T) {
	b, c := mem.New(), newClock()
	table := c.open(t, b, "a")
	for range 5 {
		renew(t, table, mount("1"))
		c.pass(lease.Slack, table)
	}
	want(t, "renewed", table, mount("1"))
	table.End("1")
	table.End("1")
	want(t, "ended", table)
}

// TestASleepEndsNoLease: nobody could renew them in that time.
func TestASleepEndsNoLease(t *testing.T) {
	b, c := mem.New(), newClock()
	table := c.open(t, b, "a")
	renew(t, table, mount("1"))
	for _, jump := range []time.Duration{6 * time.Hour, -6 * time.Hour, 100 * time.Hour} {
		c.now = c.now.Add(jump)
		table.Tick()
	}
	want(t, "after sleeping", table, mount("1"))
	c.pass(lease.Slack+31*time.Second, table)
	want(t, "after waking", table)
}

func TestANodeCountsTheLeasesOfOthers(t *testing.T) {
	b, c := mem.New(), newClock()
	writer, reader := c.open(t, b, "writer"), c.open(t, b, "reader")
	renew(t, writer, mount("w"))
	renew(t, reader, mount("r"))
	want(t, "both", writer, mount("w"), mount("r"))
	c.pass(lease.Quiet/2, writer)
	renew(t, writer, mount("w"))
	other := mount("s")
	renew(t, reader, other) // a sign of life
	want(t, "half a while later", writer, mount("w"), mount("r"), other)
	c.pass(lease.Quiet-time.Minute, writer)
	renew(t, writer, mount("w"))
	want(t, "just before", writer, mount("w"), mount("r"), other)
	c.pass(2*time.Minute, writer)
	want(t, "a node that is gone", writer, mount("w"))
	if keys := buckettest.Keys(t, b, lease.Prefix); len(keys) != 1 {
		t.Errorf("objects: %q, want the writer's", keys)
	}
}

func TestManyNewLeasesAreFewWrites(t *testing.T) {
	b, c := mem.New(), newClock()
	table := c.open(t, b, "a")
	var g sync.WaitGroup
	for i := range 256 {
		g.Go(func() {
			if err := table.Renew(t.Context(), mount(fmt.Sprint(i))); err != nil {
				t.Error(err)
			}
		})
	}
	g.Wait()
	if got := len(c.open(t, b, "a").Live()); got != 256 {
		t.Errorf("%d leases are stored, want 256", got)
	}
}

func TestLeasesAreBounded(t *testing.T) {
	table := newClock().open(t, mem.New(), "a")
	for _, l := range []lease.Lease{{ID: "", TTLSeconds: 1}, {ID: "x"}, {ID: "x", TTLSeconds: 3601}, {ID: strings.Repeat("x", 65), TTLSeconds: 1}, {ID: "x", TTLSeconds: 1 << 62}} {
		if err := table.Renew(t.Context(), l); err == nil {
			t.Errorf("%+v was taken", l)
		}
	}
	var ls []string
	for i := range lease.MaxLeases {
		ls = append(ls, fmt.Sprintf(`{"id":"%04d","image":"%s","bootstrap":"%[2]s","ttl_seconds":60}`, i, chunk.Digest{}))
	}
	b := mem.New()
	buckettest.Put(t, b, lease.Prefix+"a", []byte(`{"version":1,"node":"a","beat":1,"leases":[`+strings.Join(ls, ",")+`]}`))
	table = newClock().open(t, b, "a")
	if err := table.Renew(t.Context(), mount("one more")); !errors.Is(err, lease.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	renew(t, table, mount("0007"))
}

func TestAWriteThatFailsIsToldAndTriedAgain(t *testing.T) {
	b, c := mem.New(), newClock()
	f := &buckettest.Faulty{Bucket: b, Journal: b, Before: buckettest.FailNth(1, "Put")}
	table, err := lease.Open(t.Context(), lease.Config{Bucket: f, Node: "a", Now: func() time.Time { return c.now }})
	if err != nil {
		t.Fatal(err)
	}
	if err := table.Renew(t.Context(), mount("1")); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("got %v", err)
	}
	if _, due := table.Tick(); !due {
		t.Error("what was not stored is not due")
	}
}

func TestADamagedTableIsNamed(t *testing.T) {
	for _, text := range []string{"", "{}", `{"version":1,"node":"b","beat":1,"leases":[]}`, `{"version":2,"node":"a","beat":1,"leases":[]}`} {
		b := mem.New()
		buckettest.Put(t, b, lease.Prefix+"a", []byte(text))
		_, err := lease.Open(t.Context(), lease.Config{Bucket: b, Node: "a"})
		if err == nil || !strings.Contains(err.Error(), "leases/a is no table of leases") {
			t.Errorf("%q: got %v", text, err)
		}
	}
}

// A second renewal is not acknowledged before the first one, of the same lease, is
// durable: it may be that of a client who did not wait.
func TestARenewalIsDurableWhoeverWrites(t *testing.T) {
	b, c := mem.New(), newClock()
	putting, goOn := make(chan struct{}), make(chan struct{})
	faulty := &buckettest.Faulty{Bucket: b, Before: func(op buckettest.Op) error {
		if op.Method == "Put" {
			putting <- struct{}{}
			<-goOn
			return buckettest.ErrInjected
		}
		return nil
	}}
	table, err := lease.Open(t.Context(), lease.Config{Bucket: faulty, Node: "a", Now: func() time.Time { return c.now }})
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 2)
	go func() { errs <- table.Renew(t.Context(), mount("1")) }()
	<-putting
	go func() { errs <- table.Renew(t.Context(), mount("1")) }()
	for range 100_000 { // the second may run meanwhile, and must not end
		runtime.Gosched()
	}
	goOn <- struct{}{}
	for ended := 0; ended < 2; {
		select {
		case <-putting:
			goOn <- struct{}{}
		case err := <-errs:
			if ended++; !errors.Is(err, buckettest.ErrInjected) {
				t.Errorf("got %v, though nothing is stored", err)
			}
		}
	}
}

// Who only looks deletes nothing.
func TestALookForgetsNobody(t *testing.T) {
	b, c := mem.New(), newClock()
	renew(t, c.open(t, b, "gone"), mount("1"))
	table := c.open(t, b, "here")
	look := func(forget bool, want int) {
		t.Helper()
		if ls, err := table.All(t.Context(), forget); err != nil || len(ls) != want {
			t.Errorf("forget %t: %d leases, %v, want %d", forget, len(ls), err, want)
		}
	}
	look(true, 1)
	c.pass(lease.Quiet+time.Second, table)
	for range 2 {
		look(false, 0)
	}
	if n := len(buckettest.Keys(t, b, lease.Prefix)); n != 1 {
		t.Errorf("%d objects after a look, want 1", n)
	}
	look(true, 0)
	if n := len(buckettest.Keys(t, b, lease.Prefix)); n != 0 {
		t.Errorf("%d objects, want none", n)
	}
}
