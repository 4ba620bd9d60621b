package rescue_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"quarry/internal/rescue"
)

func TestAPanicBecomesAnErrorWithItsStack(t *testing.T) {
	err := rescue.Do(func() error { panic("at the wall") })
	var p *rescue.Panic
	if !errors.As(err, &p) || !strings.Contains(err.Error(), "at the wall") || !strings.Contains(string(p.Stack), "rescue_test.go") {
		t.Errorf("got %v", err)
	}
	if err := rescue.Func(func() error { return io.EOF })(); err != io.EOF {
		t.Errorf("got %v, want the function's own error", err)
	}
}
