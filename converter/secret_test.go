package converter_test

import (
	"errors"
	"strings"
	"testing"

	"quarry/converter"
)

// A failure record and a message are read by others than the one who typed a
// password.
func TestASourceWithAPasswordLeavesNoTrace(t *testing.T) {
	s := newStore(t)
	err := s.fail(t, "registry://robot:s3cret@127.0.0.1:1/p/x", "user or password")
	if strings.Contains(err.Error(), "s3cret") || !errors.As(err, new(*converter.InputError)) {
		t.Errorf("error %v", err)
	}
	if f, ok := s.failure(t); ok {
		t.Errorf("failure record %+v", f)
	}
}
