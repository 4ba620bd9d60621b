package oci

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// slow gives size bytes, part of them every pause.
type slow struct {
	ctx        context.Context
	size, part int
	pause      time.Duration
}

func (s *slow) Read(p []byte) (int, error) {
	select {
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	case <-time.After(s.pause):
	}
	n := min(len(p), s.part, s.size)
	if s.size -= n; n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (s *slow) Close() error { return nil }

// Some bytes now and then are no more than none.
func TestABodyMustComeAtALeastRate(t *testing.T) {
	for name, tt := range map[string]struct {
		size, part  int
		pause, idle time.Duration // idle: what the reader takes between reads
		stalls      bool
	}{
		"a byte a second":              {1 << 20, 1, time.Second, 0, true},
		"a byte in 29 seconds":         {100, 1, 29 * time.Second, 0, true},
		"a little less than the least": {1 << 20, leastBytes / 31, time.Second, 0, true},
		"a little more":                {1 << 20, leastBytes/29 + 1, time.Second, 0, false},
		"all at once after a while":    {1 << 20, 1 << 20, 29 * time.Second, 0, false},
		"a short body":                 {20, 1, time.Second, 0, false},
		"a slow reader":                {1 << 20, 1000, time.Millisecond, time.Minute, false},
		"nothing":                      {1, 1, time.Hour, 0, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			w := &watched{ReadCloser: &slow{ctx, tt.size, tt.part, tt.pause}, cancel: cancel, timeout: 30 * time.Second}
			var err error
			for p := make([]byte, 1<<20); err == nil; {
				_, err = w.Read(p)
				time.Sleep(tt.idle)
			}
			if errors.Is(err, errStalled) != tt.stalls || !tt.stalls && err != io.EOF {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}
