// Package rescue turns a panic into an error, so that the input of one job which
// finds a mistake in the code does not end the process that has others' jobs. A
// goroutine's panic can be caught in that goroutine alone, so every goroutine of
// such a job runs its work with Do.
package rescue

import (
	"fmt"
	"runtime/debug"
)

// Panic is a panic as an error. Its text leaves the stack out: that is for logs.
type Panic struct {
	Value any
	Stack []byte
}

func (p *Panic) Error() string { return fmt.Sprintf("internal error: %v", p.Value) }

// Do calls f and returns its error, or a *Panic.
func Do(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &Panic{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// Func is Do for what takes a function.
func Func(f func() error) func() error { return func() error { return Do(f) } }
