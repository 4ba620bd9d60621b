package guest

import (
	"errors"
	"fmt"
	"syscall"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// errHelper is an answer that no helper of ours gives: the guest has killed it, or
// speaks in its place.
var errHelper = errors.New("the helper in the guest was stopped or answered nonsense")

// broken makes an error of an answer that cannot be.
func broken(what string) error {
	return fmt.Errorf("%w: %w: %s", sandbox.ErrFileStuck, errHelper, what)
}

// refused makes an error of what the helper gave up with in an op.
func refused(op wire.Op, p []byte) error {
	e, err := wire.DecodeError(p)
	if err != nil {
		return broken("an error that cannot be read")
	}
	kind, known := kinds[e.Errno]
	if !known {
		// Whatever else it is, it is about this file in this guest.
		kind = sandbox.ErrFilePath
	}
	if text, coded := codes[e.Errno]; coded {
		if want, ok := wanted[op]; ok && e.Errno == wire.CodeType {
			text = want
		}
		return fmt.Errorf("%w: %q: %s", kind, e.Message, text)
	}
	return fmt.Errorf("%w: %q: %w", kind, e.Message, syscall.Errno(e.Errno))
}

// kinds says what callers are told of an errno or code of the helper.
var kinds = map[uint32]error{
	uint32(syscall.ENOENT):       sandbox.ErrFileNotFound,
	uint32(syscall.ENOTDIR):      sandbox.ErrFileType,
	uint32(syscall.EISDIR):       sandbox.ErrFileType,
	uint32(syscall.ENXIO):        sandbox.ErrFileType,
	uint32(syscall.ENODEV):       sandbox.ErrFileType,
	uint32(syscall.ELOOP):        sandbox.ErrFilePath,
	uint32(syscall.ENAMETOOLONG): sandbox.ErrFilePath,
	uint32(syscall.EINVAL):       sandbox.ErrFilePath,
	uint32(syscall.EROFS):        sandbox.ErrFilePath,
	uint32(syscall.EACCES):       sandbox.ErrFilePath,
	uint32(syscall.EPERM):        sandbox.ErrFilePath,
	uint32(syscall.EBUSY):        sandbox.ErrFilePath,
	uint32(syscall.EEXIST):       sandbox.ErrFileExists,
	uint32(syscall.ENOTEMPTY):    sandbox.ErrFileExists,
	uint32(syscall.ENOSPC):       sandbox.ErrDiskFull,
	uint32(syscall.EDQUOT):       sandbox.ErrDiskFull,
	uint32(syscall.EFBIG):        sandbox.ErrTooLarge,
	uint32(syscall.EIO):          sandbox.ErrFileStuck,
	uint32(syscall.EAGAIN):       sandbox.ErrFileStuck,
	wire.CodeChanged:             sandbox.ErrFileStuck,
	wire.CodeType:                sandbox.ErrFileType,
	wire.CodeMany:                sandbox.ErrTooLarge,
	wire.CodeDeep:                sandbox.ErrFilePath,
	wire.CodeEscape:              sandbox.ErrFilePath,
	wire.CodeSum:                 sandbox.ErrDigest,
	wire.CodeProtocol:            sandbox.ErrFileStuck,
	wire.CodeLink:                sandbox.ErrFilePath,
}

// wanted says what an op needs, where the helper found another type.
var wanted = map[wire.Op]string{
	wire.OpRead:    "it is no regular file: a fifo, a device or a socket is not read",
	wire.OpWrite:   "what is there is no regular file, and is not replaced: remove it first",
	wire.OpList:    "it is no folder",
	wire.OpTarUp:   "what is there is of another type, and is not replaced: remove it first",
	wire.OpTarget:  "what is there is neither missing nor of the share's type: a folder is given at a folder, and a file at a file",
	wire.OpUnmount: "no share is there",
}

// codes are the texts of codes that are no errno.
var codes = map[uint32]string{
	wire.CodeChanged:  "it changed while it was read: read it again when nothing writes to it",
	wire.CodeType:     "it is of another type",
	wire.CodeMany:     "it has more files or bytes than one call takes: exclude some, or take its parts by themselves",
	wire.CodeDeep:     "folders are too deep, or names too long: take a folder below it by itself",
	wire.CodeEscape:   "a link leads out of the folder that is unpacked to",
	wire.CodeSum:      "other content arrived",
	wire.CodeProtocol: "the helper did not understand",
	wire.CodeLink:     "it is a symlink: name what it leads to, without links on the way",
}
