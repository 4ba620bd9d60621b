package sentry_test

import (
	"testing"

	"quarry/worker/sentry"
	"quarry/worker/sentry/sentrytest"
)

// BenchmarkExecute is what the Sentry itself takes for `true`.
func BenchmarkExecute(b *testing.B) {
	box := sentrytest.Start(b)
	c := sentry.New(box.Socket, box.ID)
	defer c.Close()
	for b.Loop() {
		pid, err := c.Execute(b.Context(), sentry.Exec{Argv: []string{"/bin/true"}})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := c.WaitPID(b.Context(), pid); err != nil {
			b.Fatal(err)
		}
	}
}
