// Package nbd speaks the Network Block Device protocol, as server and client:
// fixed newstyle handshake, simple and structured replies, read-only exports.
// It imports nothing of quarry, so any NBD program can stand on either side.
package nbd

import "context"

// Device is what an export serves: a read-only array of bytes.
type Device interface {
	// ReadAt fills p with the bytes at off, all of them right, or returns an
	// error and leaves p undefined. off+len(p) is at most Size(). Safe for
	// concurrent use.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// Size is the device's length in bytes, constant, a multiple of 4096.
	Size() int64
}

// ReadyDevice is a Device that can say that it has the bytes at hand.
type ReadyDevice interface {
	Device
	// TryReadAt is ReadAt when that would not wait for anything; it returns false
	// otherwise, also for an error, and leaves p undefined.
	TryReadAt(p []byte, off int64) bool
}
