package worker

import (
	"context"

	"quarry/worker/folder"
)

// acquireForSandbox is Acquire for a mount that becomes a sandbox's root. runsc
// lists a file's POSIX ACLs and refuses to read them, and then cannot copy the
// file, or a directory that something is made in, to the writable layer. So it
// gets an image that has ACLs from a mount of its own, where nothing has one.
func (w *Worker) acquireForSandbox(ctx context.Context, im *folder.Image) (*Mount, error) {
	return w.acquire(ctx, im, im.ACL)
}
