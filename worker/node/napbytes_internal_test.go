package node

import "testing"

// The disk that a hibernated sandbox takes is given back with it.
func TestTheDiskOfAHibernatedSandboxIsGivenBack(t *testing.T) {
	r := newBoxRig(t)
	r.b.n.ledger, r.b.n.ended, r.b.n.keys, r.b.n.records = newLedger(amount{}, 1), map[string]record{}, map[string]keyed{}, records{t.TempDir()}
	if err := r.locked(func() error { return r.b.hold(byCall) }); err != nil {
		t.Fatal(err)
	}
	if err := r.locked(r.b.hibernate); err != nil {
		t.Fatal(err)
	}
	const name = "quarry_hibernate_bytes"
	if got := gauge(t, r.b.n.c.Naps, name); got == 0 {
		t.Error("it takes none")
	}
	f := facts{at: r.b.n.now()}
	r.b.conclude(t.Context(), f.ended())
	if got := gauge(t, r.b.n.c.Naps, name); got != 0 {
		t.Errorf("it has ended, and takes %v bytes", got)
	}
}
