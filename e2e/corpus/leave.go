package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// leaveImages unmounts the images of this machine's workers in this process's
// mount namespace, which must be its own: a copy of a mount keeps it in use for
// as long as a build takes.
func leaveImages() error {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for _, point := range slices.Backward(imageMounts(string(raw))) {
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s in the build's namespace: %w", point, err)
		}
	}
	return nil
}

// imageMounts lists the mount points of images in a mount table, in its order.
func imageMounts(table string) []string {
	var points []string
	for line := range strings.Lines(table) {
		const pointField = 4
		place, source, _ := strings.Cut(line, " - ")
		f := strings.Fields(place)
		if fs, _, _ := strings.Cut(source, " "); len(f) > pointField && (fs == "erofs" || fs == "fuse.quarry") {
			points = append(points, unescapeMount.Replace(f[pointField]))
		}
	}
	return points
}

// unescapeMount reads a path as mountinfo writes it.
var unescapeMount = strings.NewReplacer(`\134`, `\`, `\040`, " ", `\011`, "\t", `\012`, "\n")
