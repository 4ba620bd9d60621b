package tree

import (
	"errors"
	"fmt"
	"strings"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// newFile returns the file that e describes; e is not a hard link.
func (m *Merger) newFile(e *image.Entry) (*file, error) {
	if e.MtimeNsec > 999_999_999 {
		return nil, fmt.Errorf("the mtime has %d nanoseconds", e.MtimeNsec)
	}
	f := &file{layer: m.layer, Inode: rafs.Inode{
		Mode: e.Mode & rafs.ModePerm, UID: e.UID, GID: e.GID,
		Mtime: e.Mtime, MtimeNsec: e.MtimeNsec,
	}}
	if err := m.setType(f, e); err != nil {
		return nil, err
	}
	return f, m.setXattrs(f, e)
}

// setType sets the type of f and what only files of that type have.
func (m *Merger) setType(f *file, e *image.Entry) error {
	switch e.Type {
	case image.TypeReg:
		f.Mode |= rafs.ModeRegular
		f.Size, f.Chunks = e.Size, e.Chunks
		if e.Size < 0 || int64(len(e.Chunks)) != chunk.Count(e.Size, int64(m.cfg.ChunkSize)) {
			return fmt.Errorf("%d chunks of %d bytes do not make %d bytes", len(e.Chunks), m.cfg.ChunkSize, e.Size)
		}
	case image.TypeDir:
		f.Mode |= rafs.ModeDir
		f.folder = newFolder()
	case image.TypeSymlink:
		f.Mode = rafs.ModeSymlink | 0o777 // Linux gives symlinks no other mode
		f.Target = e.Link
		return m.checkTarget(e.Link)
	case image.TypeFIFO:
		f.Mode |= rafs.ModeFIFO
	case image.TypeChar, image.TypeBlock:
		f.Mode |= rafs.ModeChar
		if e.Type == image.TypeBlock {
			f.Mode = f.Mode&rafs.ModePerm | rafs.ModeBlock
		}
		if e.Major > image.MaxMajor || e.Minor > image.MaxMinor {
			return fmt.Errorf("the device number %d,%d is above %d,%d", e.Major, e.Minor, image.MaxMajor, image.MaxMinor)
		}
		f.Rdev = rafs.Makedev(e.Major, e.Minor)
	default:
		return fmt.Errorf("the entry type %q is unknown", e.Type)
	}
	return nil
}

func (m *Merger) checkTarget(target string) error {
	switch most := m.cfg.Limits.TargetBytes; {
	case target == "":
		return errors.New("the symlink has no target")
	case len(target) > most:
		return fmt.Errorf("the symlink's target has %d bytes, at most %d are possible (limit TargetBytes)", len(target), most)
	case strings.IndexByte(target, 0) >= 0:
		return errors.New("the symlink's target holds a NUL byte")
	}
	return nil
}
