package attach

import (
	"errors"
	"fmt"
	"os"
)

// Mode is how an export becomes something that the kernel mounts.
type Mode string

// The modes.
const (
	ModeAuto Mode = "auto" // ModeNBD where the kernel has it, else ModeFUSE; no device to be had is an error
	ModeNBD  Mode = "nbd"  // the kernel's own NBD client
	ModeFUSE Mode = "fuse" // a loop device on a file served by FUSE
	ModeFile Mode = "file" // the EROFS on that file itself, Linux 6.12 and newer; for comparison
)

// Modes are those that ParseMode knows, for help texts.
const Modes = "auto, nbd, fuse or file"

// ParseMode reads a mode's name.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case ModeAuto, ModeNBD, ModeFUSE, ModeFile:
		return m, nil
	}
	return "", fmt.Errorf("attach mode %q is unknown: want %s", s, Modes)
}

// Used returns the mode that m means on this machine.
func (m Mode) Used() Mode {
	if m != ModeAuto && m != "" {
		return m
	}
	if ProbeNBD() == nil {
		return ModeNBD
	}
	return ModeFUSE
}

// binder returns what binds in mode m, which is not ModeAuto.
func (m Mode) binder() (binder, error) {
	switch m {
	case ModeNBD:
		return bindNBD, nil
	case ModeFUSE:
		return bindFUSE, nil
	case ModeFile:
		return bindFile, nil
	}
	return nil, fmt.Errorf("attach mode %q is unknown", m)
}

// ErrNoNBD says that this kernel has no NBD, or that none can be had.
var ErrNoNBD = errors.New("no kernel NBD")

// ProbeNBD returns nil when the kernel's NBD client can be used: it answers on
// netlink, which loads the module where the kernel can do that, and devices of
// its are there. Errors: ErrNoNBD.
func ProbeNBD() error {
	g, err := openNBD()
	if err != nil {
		return err
	}
	g.close()
	if _, err := os.Stat(nbdPath(0)); err != nil {
		return fmt.Errorf("%w: %w: load the module with nbds_max=16 or more, or attach through FUSE (--attach fuse)", ErrNoNBD, err)
	}
	return nil
}
