package attach

import (
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// sysfsPath returns the path of a block device's attribute; device is a path in
// /dev.
func sysfsPath(device, name string) string {
	return filepath.Join("/sys/block", filepath.Base(device), name)
}

// readSysfs reads an attribute without the os package, for use in isolation.
func readSysfs(device, name string) (string, error) {
	path := sysfsPath(device, name)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	buf := make([]byte, unix.PathMax+1)
	got, err := unix.Read(fd, buf)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return strings.TrimSuffix(string(buf[:got]), "\n"), nil
}

func writeSysfs(device, name, value string) error {
	path := sysfsPath(device, name)
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return fmt.Errorf("write %s to %s: %w", value, path, err)
	}
	return nil
}
