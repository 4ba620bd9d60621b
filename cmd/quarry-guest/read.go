package main

import (
	"crypto/sha256"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// unsizedMax is what is read of a file that says it is empty, as those of /proc do:
// whoever reads is told its size before the first byte.
const unsizedMax = 4 << 20

func (h *helper) read() error {
	var st unix.Stat_t
	fd, err := openFile(unix.AT_FDCWD, h.q.Path, true, &st)
	if err != nil {
		return fail(err, h.q.Path)
	}
	e := entryOf(&st, h.q.Path)
	if e.Size == 0 {
		return h.readUnsized(fd, e)
	}
	off, n := part(h.q, e.Size)
	if n > h.q.MaxBytes {
		return code(wire.CodeMany, h.q.Path)
	}
	h.send(wire.KindEntry, e.Encode())
	sum, err := h.sendData(fd, off, n)
	if err != nil {
		return fail(err, h.q.Path)
	}
	h.send(wire.KindSum, sum.Encode())
	return nil
}

// part is what a request asks for of so many bytes.
func part(q wire.Request, size int64) (off, n int64) {
	off = q.Offset
	if off < 0 {
		off = max(size+off, 0)
	}
	n = max(size-off, 0)
	if q.Length >= 0 {
		n = min(n, q.Length)
	}
	return off, n
}

// readUnsized sends a file that says it is empty, of /proc or really so.
func (h *helper) readUnsized(fd int, e wire.Entry) error {
	var all []byte
	b := make([]byte, wire.MaxData)
	for {
		n, err := unix.Read(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fail(err, e.Path)
		}
		if n == 0 {
			break
		}
		if len(all)+n > unsizedMax {
			return code(wire.CodeType, e.Path)
		}
		all = append(all, b[:n]...)
	}
	e.Size = int64(len(all))
	off, n := part(h.q, e.Size)
	if n > 0 {
		all = all[off:][:n]
	} else {
		all = nil
	}
	h.send(wire.KindEntry, e.Encode())
	sum := wire.Sum{Size: n, SHA256: sha256.Sum256(all)}
	for len(all) > 0 {
		k := min(len(all), wire.MaxData)
		h.send(wire.KindData, all[:k])
		all = all[k:]
	}
	h.send(wire.KindSum, sum.Encode())
	return nil
}

// sendData sends exactly n bytes of a file.
func (h *helper) sendData(fd int, off, n int64) (wire.Sum, error) {
	digest := sha256.New()
	sum := wire.Sum{Size: n}
	if h.data == nil {
		h.data = make([]byte, wire.MaxData)
	}
	for n > 0 && h.out == nil {
		b := h.data[:min(n, wire.MaxData)]
		got, err := unix.Pread(fd, b, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return sum, err
		}
		if got == 0 {
			return sum, code(wire.CodeChanged, h.q.Path)
		}
		digest.Write(b[:got])
		h.send(wire.KindData, b[:got])
		off, n = off+int64(got), n-int64(got)
	}
	digest.Sum(sum.SHA256[:0])
	return sum, nil
}

// unblock lets those go on who wait for a writer of a fifo. Without one who waits
// the open fails, and nothing is to be done.
func (h *helper) unblock() error {
	var st unix.Stat_t
	if err := unix.Stat(h.q.Path, &st); err != nil {
		return fail(err, h.q.Path)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return code(wire.CodeType, h.q.Path)
	}
	fd, err := unix.Open(h.q.Path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil && err != unix.ENXIO {
		return fail(err, h.q.Path)
	}
	if err == nil {
		unix.Close(fd)
	}
	h.send(wire.KindEnd, nil)
	return nil
}
