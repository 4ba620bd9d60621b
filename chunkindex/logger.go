package chunkindex

import (
	"fmt"
	"log/slog"
)

// logger hands Pebble's messages on. They are sentences, not constants, so they
// are an attribute here.
type logger struct{ log *slog.Logger }

// fatalError is what Pebble told before it wanted to end the process.
type fatalError struct {
	message string
	cause   error // nil when it is not known
}

func (e fatalError) Error() string { return e.message }
func (e fatalError) Unwrap() error { return e.cause }

func (l logger) Infof(format string, args ...any) {
	l.log.Debug("pebble", "message", fmt.Sprintf(format, args...))
}

func (l logger) Errorf(format string, args ...any) {
	l.log.Warn("pebble", "message", fmt.Sprintf(format, args...))
}

// Fatalf must not return: Pebble's state is undefined after it.
func (l logger) Fatalf(format string, args ...any) {
	e := fatalError{message: fmt.Sprintf(format, args...)}
	for _, arg := range args {
		if err, ok := arg.(error); ok {
			e.cause = err
		}
	}
	panic(e)
}
