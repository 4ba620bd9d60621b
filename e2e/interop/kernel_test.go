//go:build interop

package interop_test

import (
	"context"
	"testing"
)

// TestKernel mounts each image as a worker does and reads all of it through the
// kernel's EROFS.
func TestKernel(t *testing.T) {
	for _, cv := range images(t) {
		t.Run(cv.name, func(t *testing.T) {
			mnt, ctx := t.TempDir(), context.Background()
			flags := []string{"--data", shared.lab.Path("data"), "--worker-dir", shared.lab.Path("worker")}
			if _, err := shared.lab.Quarry(ctx, append([]string{"mount", cv.ref, mnt}, flags...)...); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if _, err := shared.lab.Quarry(ctx, append([]string{"umount", mnt}, flags[2:]...)...); err != nil {
					t.Error(err)
				}
			}()
			compare(t, cv.listDir(t, mnt), listTree(t, cv.image.Tree), nil)
		})
	}
}
