package network_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"quarry/worker/network"
)

func TestList(t *testing.T) {
	refused := errors.New("refused")
	for name, c := range map[string]struct {
		fail  int
		err   error
		asked int
		want  error
	}{
		"whole":       {0, nil, 1, nil},
		"changing":    {3, fmt.Errorf("list: %w", netlink.ErrDumpInterrupted), 4, nil},
		"never whole": {1 << 20, netlink.ErrDumpInterrupted, 20, netlink.ErrDumpInterrupted},
		"refused":     {1 << 20, refused, 1, refused},
	} {
		asked := 0
		_, err := network.List(func() ([]int, error) {
			if asked++; asked <= c.fail {
				return []int{asked}, c.err
			}
			return nil, nil
		})
		if asked != c.asked || !errors.Is(err, c.want) || (c.want == nil) != (err == nil) {
			t.Errorf("%s: asked %d times, %v; want %d, %v", name, asked, err, c.asked, c.want)
		}
	}
}
