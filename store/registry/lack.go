package registry

import (
	"errors"
	"slices"
	"time"
)

// roomIdle is how long nothing was written to an upload that goes when another one lacks
// the room that it takes: one that a client resumes was written to seconds ago.
const roomIdle = 5 * time.Minute

// lackError says how many bytes would have to be free for what it refuses.
type lackError struct {
	bytes int64
	own   bool // of the holder's own
	error
}

// Unwrap returns what callers branch on.
func (e lackError) Unwrap() error { return e.error }

// makeRoom tries what takes room for a holder, and again when that is refused for a lack
// that idle uploads can make up for, which else would refuse it until UploadIdle is over.
func (us *uploads) makeRoom(holder string, try func() error) error {
	for {
		err := try()
		var lack lackError
		if !errors.As(err, &lack) {
			return err
		}
		u := us.takeIdle(holder, lack)
		if u == nil || us.drop(u) != nil {
			return err
		}
	}
}

// takeIdle takes the upload of which roomIdle is over for longest, the holder's before
// others'; nil when all of them have not the bytes that are lacking. It is the caller's
// to drop.
func (us *uploads) takeIdle(holder string, lack lackError) *upload {
	us.mu.Lock()
	defer us.mu.Unlock()
	var idle []*upload
	var sum int64
	for _, u := range us.byID {
		if !u.busy && u.size > 0 && us.cfg.Now().Sub(u.touched) > roomIdle && (u.holder == holder || !lack.own) {
			idle = append(idle, u)
			sum += u.size
		}
	}
	if sum < lack.bytes {
		return nil
	}
	u := slices.MinFunc(idle, func(a, b *upload) int {
		if own := a.holder == holder; own != (b.holder == holder) {
			if own {
				return -1
			}
			return 1
		}
		return a.touched.Compare(b.touched)
	})
	u.busy = true // nobody writes to it any more
	return u
}
