package network_test

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"quarry/worker/network"
)

// peek says what the network of a sandbox is that another process has.
func peek(t *testing.T, folder, id string) *network.Link {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(folder, "sandboxes", id+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ Slot string }
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	i, err := strconv.Atoi(r.Slot)
	if err != nil {
		t.Fatal(err)
	}
	a := network.DefaultRange.Addr().As4()
	a[2], a[3] = byte(i*2>>8), byte(i*2)
	gateway := netip.AddrFrom4(a)
	_, prefix := network.Names(folder)
	return &network.Link{ID: id, NetnsPath: filepath.Join(folder, "ns", r.Slot), Veth: prefix + r.Slot, Gateway: gateway, Addr: gateway.Next(), DNS: gateway}
}
