//go:build !vm

package attach_test

import "quarry/nbd/attach"

// modes are those that eachMode tests; with the tag vm it is the kernel's NBD,
// in the guests of e2e/vm.
var modes = []attach.Mode{attach.ModeFUSE}
