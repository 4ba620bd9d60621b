package blockdev_test

import (
	"testing"

	"quarry/nbd/blockdev"
)

// The first half of the read pushes the second out of memory: it is spent when it
// was read, and an eighth of the room is for such chunks.
func TestATryThatFailsHalfWayCountsNothing(t *testing.T) {
	m := makeDirs(t, 1, 3, 4096)
	d := m.device(t, func(c *blockdev.Config) { c.Memory = blockdev.NewMemory(8 * 4096) })
	checkRead(t, d, m.flat, m.dataOff(1), 4096) // spent
	e := d.Expect([]uint32{0})
	m.deliver(t, e, 0) // not read yet
	e.End()
	before := d.Stats()
	if d.TryReadAt(make([]byte, 2*4096), m.dataOff(0)) {
		t.Fatal("both chunks were there to the end")
	}
	if after := d.Stats(); after.Memory != before.Memory || after.ReadBytes != before.ReadBytes || after.Touched != before.Touched {
		t.Errorf("a read that did not happen was counted: %+v, before %+v", after, before)
	}
	checkRead(t, d, m.flat, m.dataOff(0), 2*4096)
	if s := d.Stats(); s.Memory.Reads+s.Store.Reads+s.Start.Reads != 3 {
		t.Errorf("%+v, want 3 chunks read", s)
	}
}
