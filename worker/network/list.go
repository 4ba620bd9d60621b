package network

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// listTries bounds how often a list is asked for that changes while it is read.
const listTries = 20

// List asks for a list of the kernel's, such as netlink.LinkList gives, until it is
// whole: one that changes while it is read comes with an error. On a node where
// interfaces come and go that is nothing unusual.
func List[T any](ask func() ([]T, error)) (list []T, err error) {
	for range listTries {
		list, err = ask()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}
