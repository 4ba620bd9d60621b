package nbd

import (
	"errors"
	"testing"
)

// TestClientLeavesAServerThatGuessesCookies has it answer what it has not read,
// while the socket has no room for more.
func TestClientLeavesAServerThatGuessesCookies(t *testing.T) {
	for name, guess := range map[string]func(sent uint64) (first, last uint64){
		"of all that were sent": func(sent uint64) (first, last uint64) { return 1, sent },
		"of one that was not":   func(sent uint64) (first, last uint64) { return sent + 1, sent + 1 },
	} {
		t.Run(name, func(t *testing.T) {
			ends := socketPair(t)
			c, err := newClient(ends[1], offer{name: "image", size: 4096, maxPayload: MaxView})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			const calls = 1 << 14 // of 28 bytes; a socket has room for some hundreds
			ended := make(chan error, calls)
			for range calls {
				c.Start(&Call{End: func(_ []byte, err error) { ended <- err }})
			}
			c.mu.Lock()
			sent := uint64(calls - len(c.unsent))
			c.mu.Unlock()
			if sent == 0 || sent == calls {
				t.Fatalf("%d of %d requests were sent", sent, calls)
			}
			for first, last := guess(sent); first <= last; first++ {
				if _, err := ends[0].Write(simpleHeader(request{cookie: first}, 0)); err != nil {
					break // the client has had enough
				}
			}
			var lost *ConnError
			for range calls {
				if err := <-ended; err != nil && !errors.As(err, &lost) {
					t.Fatalf("got %v, want the loss of the connection", err)
				}
			}
			if lost == nil {
				t.Error("the connection lives")
			}
		})
	}
}
