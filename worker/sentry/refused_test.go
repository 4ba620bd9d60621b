package sentry_test

import (
	"errors"
	"fmt"
	"testing"

	"quarry/worker/sentry"
)

// The texts are those of the runsc that quarry is tested with.
func TestWhatARefusalIsAbout(t *testing.T) {
	for text, want := range map[string]error{
		"failed to create new task: try again":                                                        sentry.ErrProcesses,
		`error finding executable "x" in PATH [/bin]: no such file or directory`:                      sentry.ErrNoFile,
		"failed to set working directory: not a directory":                                            sentry.ErrNoFile,
		`error finding executable "/root/x" in PATH []: permission denied, no such file or directory`: nil,
		"try again later, it says":                                                                    nil,
		"exec format error":                                                                           nil,
	} {
		err := fmt.Errorf("wrapped: %w", &sentry.RemoteError{Method: "m", Message: text})
		for _, kind := range []error{sentry.ErrProcesses, sentry.ErrNoFile} {
			if errors.Is(err, kind) != (kind == want) {
				t.Errorf("%q is %v: %t", text, kind, errors.Is(err, kind))
			}
		}
	}
}
