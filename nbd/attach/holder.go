package attach

import (
	"os"
	"path/filepath"
)

// Holder tells whether a process serves the folder of an attachment, or has
// begun to, and which. Its pid is 0 when it cannot be named here: it is yet to
// write its record, is of another PID namespace, or only sweeps the folder.
func Holder(path string) (pid int, held bool) {
	dir, err := realFolder(path)
	if err != nil {
		return 0, false
	}
	if p, ok := dir.holder(); ok {
		return p.pid, true
	}
	return 0, dir.locked()
}

// Locked tells whether some process serves the folder of an attachment, or
// sweeps it: the cheap half of Holder.
func Locked(path string) bool {
	dir, err := realFolder(path)
	return err == nil && dir.locked()
}

// Leftovers reports whether there is something in the folder for Sweep to undo,
// as long as nobody holds it.
func Leftovers(path string) bool {
	dir := folder(path)
	for _, name := range []string{filepath.Join(path, stateFile), dir.root(), dir.fuse()} {
		if _, err := os.Lstat(name); err == nil {
			return true
		}
	}
	return false
}
