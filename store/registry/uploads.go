package registry

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"quarry/internal/durable"
	"quarry/internal/strictjson"
	"quarry/store/image"
)

// headerSize is the length of the header of an upload's file: a repository of at
// most 255 bytes and some 30 around it.
const headerSize = 512

// uploadHeader starts the file of an upload; the bytes of the blob follow it.
type uploadHeader struct {
	Version int    `json:"version"`
	Repo    string `json:"repo"`
}

// upload is one upload under way. Its file is the truth about what was received.
type upload struct {
	id, repo string
	holder   string    // whose it is, "" for nobody's
	busy     bool      // a request writes to it
	size     int64     // bytes of the blob that are in the file
	touched  time.Time // the end of the last request that wrote to it
	named    bool      // the file's name is durable
}

// uploads are the uploads under way, each a file <id> in one folder.
type uploads struct {
	dir  *os.Root
	path string
	cfg  Config

	mu   sync.Mutex // guards what is below, and the fields of each upload
	byID map[string]*upload
	used int64 // bytes of all, and those reserved for what is being received
	// usedBy is what of it each holder has; of those that have something.
	usedBy map[string]int64
	due    int64 // of used, what is reserved and not yet in a file
}

// openUploads takes up the uploads that are in the folder: they go on where their
// files end. A file that is none of ours is an error, one that was cut off at its
// start is removed.
func openUploads(cfg Config) (*uploads, error) {
	if err := durable.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	dir, err := os.OpenRoot(cfg.Dir)
	if err != nil {
		return nil, err
	}
	us := &uploads{dir: dir, path: cfg.Dir, cfg: cfg, byID: map[string]*upload{}, usedBy: map[string]int64{}}
	entries, err := fs.ReadDir(dir.FS(), ".")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		u, err := us.takeUp(e.Name())
		if errors.Is(err, errNoHeader) {
			err = dir.Remove(e.Name())
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(cfg.Dir, e.Name()), err)
		}
		if u != nil {
			us.byID[u.id] = u
			us.used += u.size
		}
	}
	return us, nil
}

// errNoHeader says that the process died before the header was in the file, which
// nobody was told of.
var errNoHeader = errors.New("upload has no header")

func (us *uploads) takeUp(name string) (*upload, error) {
	f, err := us.dir.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a file; the folder is for uploads alone")
	}
	var raw [headerSize]byte
	if _, err := f.ReadAt(raw[:], 0); err != nil {
		return nil, errNoHeader
	}
	h, err := strictjson.Decode[uploadHeader](bytes.TrimRight(raw[:], " "), headerSize)
	if err != nil || h.Version != recordVersion || image.ValidateRepo(h.Repo) != nil {
		return nil, errNoHeader
	}
	if err := f.Sync(); err != nil { // what is told to be stored is durable
		return nil, err
	}
	return &upload{id: name, repo: h.Repo, size: info.Size() - headerSize, touched: info.ModTime()}, nil
}

// start makes a new upload.
func (us *uploads) start(repo, holder string) (*upload, error) {
	header, err := json.Marshal(uploadHeader{Version: recordVersion, Repo: repo})
	if err != nil {
		return nil, err
	}
	header = append(header, strings.Repeat(" ", headerSize-len(header))...)
	u := &upload{id: rand.Text(), repo: repo, holder: holder, touched: us.cfg.Now()}
	us.sweep()
	if err := us.add(u); err != nil {
		return nil, err
	}
	f, err := us.dir.OpenFile(u.id, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		_, err = f.Write(header)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		us.drop(u)
		return nil, fmt.Errorf("start upload to %s: %w", repo, err)
	}
	return u, nil
}

// add makes room for an upload. Errors: ErrUploads, ErrHolderUploads.
func (us *uploads) add(u *upload) error {
	us.mu.Lock()
	defer us.mu.Unlock()
	if len(us.byID) >= us.cfg.MaxUploads {
		return fmt.Errorf("%w: %d are under way; finish or cancel one, or try later", ErrUploads, us.cfg.MaxUploads)
	}
	held := 0
	for _, o := range us.byID {
		if o.holder == u.holder {
			held++
		}
	}
	if u.holder != "" && held >= us.cfg.HolderUploads {
		return fmt.Errorf("%w: %d are under way; finish or cancel one, or try later", ErrHolderUploads, held)
	}
	us.byID[u.id] = u
	return nil
}

// find returns the upload of a repository. Errors: ErrUploadUnknown.
func (us *uploads) find(repo, id string) (*upload, error) {
	u := us.byID[id]
	if u == nil || u.repo != repo {
		return nil, fmt.Errorf("%w: %s has no upload %.64q: start it anew", ErrUploadUnknown, repo, id)
	}
	return u, nil
}

// acquire makes the caller the one who writes to an upload, until release. Errors:
// ErrUploadUnknown, ErrUploadBusy.
func (us *uploads) acquire(repo, id string) (*upload, error) {
	us.mu.Lock()
	defer us.mu.Unlock()
	u, err := us.find(repo, id)
	if err != nil {
		return nil, err
	}
	if u.busy {
		return nil, fmt.Errorf("%w: %s; ask for its offset and go on from there", ErrUploadBusy, id)
	}
	u.busy = true
	return u, nil
}

func (us *uploads) release(u *upload) {
	us.mu.Lock()
	defer us.mu.Unlock()
	u.busy, u.touched = false, us.cfg.Now()
}

// offset returns how much of an upload is stored.
func (us *uploads) offset(repo, id string) (int64, error) {
	us.mu.Lock()
	defer us.mu.Unlock()
	u, err := us.find(repo, id)
	if err != nil {
		return 0, err
	}
	return u.size, nil
}

// reserve takes room for n more bytes of an upload. Errors: ErrUploadSpace,
// ErrHolderSpace, and ENOSPC when the disk would have less than Config.KeepFree then:
// what a node needs to go on, and to start again, is not for uploads.
func (us *uploads) reserve(u *upload, n int64) error {
	return us.makeRoom(u.holder, func() error { return us.tryReserve(u, n) })
}

func (us *uploads) tryReserve(u *upload, n int64) error {
	us.mu.Lock()
	defer us.mu.Unlock()
	most := us.cfg.UploadSpace / 4 * 3
	if lack := us.usedBy[u.holder] + n - most; u.holder != "" && lack > 0 {
		return lackError{lack, true, fmt.Errorf("%w: its unfinished uploads have %d of %d bytes (three quarters of --upload-space); finish or cancel one, or try later",
			ErrHolderSpace, us.usedBy[u.holder], most)}
	}
	if err := us.room(n); err != nil {
		return err
	}
	if lack := us.used + n - us.cfg.UploadSpace; lack > 0 {
		return lackError{lack, false, fmt.Errorf("%w: unfinished uploads have %d of %d bytes (--upload-space); finish or cancel one, or try later",
			ErrUploadSpace, us.used, us.cfg.UploadSpace)}
	}
	us.take(u, n)
	us.due += n
	return nil
}

// room fails when the disk would have less than Config.KeepFree with n more bytes. mu is
// held.
func (us *uploads) room(n int64) error {
	if us.cfg.KeepFree == 0 {
		return nil
	}
	free, err := freeBytes(us.path)
	if err != nil {
		return err
	}
	if lack := us.cfg.KeepFree + us.due + n - free; lack > 0 {
		return lackError{lack, false, fmt.Errorf("%w: uploads leave %d MiB of the disk of %s free, and %d MiB are: free space and try again",
			syscall.ENOSPC, us.cfg.KeepFree>>20, us.path, free>>20)}
	}
	return nil
}

// copying takes room on the disk for a copy of n bytes in the bucket, where it is on the
// same disk, until done is called. Errors: as reserve's of the disk.
func (us *uploads) copying(n int64) (done func(), err error) {
	if !us.cfg.SameDisk {
		return func() {}, nil
	}
	err = us.makeRoom("", func() error {
		us.mu.Lock()
		defer us.mu.Unlock()
		if err := us.room(n); err != nil {
			return err
		}
		us.due += n
		return nil
	})
	if err != nil {
		return nil, err
	}
	return func() {
		us.mu.Lock()
		defer us.mu.Unlock()
		us.due -= n
	}, nil
}

// take counts n more bytes of an upload's holder, or fewer. mu is held.
func (us *uploads) take(u *upload, n int64) {
	us.used += n
	if u.holder == "" {
		return
	}
	if us.usedBy[u.holder] += n; us.usedBy[u.holder] == 0 {
		delete(us.usedBy, u.holder)
	}
}

// giveBack ends a reservation that was not used.
func (us *uploads) giveBack(u *upload, n int64) {
	us.mu.Lock()
	defer us.mu.Unlock()
	us.take(u, -n)
	us.due -= n
}

// wrote makes n bytes part of an upload; they stay reserved as long as it is there.
func (us *uploads) wrote(u *upload, n int64) {
	us.mu.Lock()
	defer us.mu.Unlock()
	u.size += n
	us.due -= n
}

// drop ends an upload and removes its file. One that cannot be removed goes on
// taking room, until the next start finds it.
func (us *uploads) drop(u *upload) error {
	err := us.dir.Remove(u.id)
	us.mu.Lock()
	defer us.mu.Unlock()
	delete(us.byID, u.id)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		us.take(u, -u.size)
		return nil
	}
	return fmt.Errorf("remove upload %s: %w", filepath.Join(us.path, u.id), err)
}

// sweep drops uploads that nothing was written to for Config.UploadIdle, or EmptyIdle
// when they have nothing, and returns how many.
func (us *uploads) sweep() int {
	var old []*upload
	us.mu.Lock()
	now := us.cfg.Now()
	for _, u := range us.byID {
		idle := us.cfg.UploadIdle
		if u.size == 0 {
			idle = us.cfg.EmptyIdle
		}
		if !u.busy && now.Sub(u.touched) > idle {
			u.busy = true // nobody writes to it any more
			old = append(old, u)
		}
	}
	us.mu.Unlock()
	for _, u := range old {
		_ = us.drop(u) // what cannot be removed is tried again when it is found anew
	}
	return len(old)
}
