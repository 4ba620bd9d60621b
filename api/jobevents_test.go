package api_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

// A stream of events lives no longer than the token that it was asked for with: who is
// shut out hears nothing of what happens after it, however long ago the stream began.
func TestAStreamEndsWithItsToken(t *testing.T) {
	w := apitest.New(t)
	q, err := jobs.Open(t.Context(), jobs.Config{Bucket: w.Bucket})
	if err != nil {
		t.Fatal(err)
	}
	g := newGuarded(t, w, func(c *api.Config) { c.Jobs = q })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // of a test that hangs
	defer cancel()
	push := func(i byte) {
		t.Helper()
		if _, err := q.Push(ctx, chunk.Sum([]byte{i}), "", jobs.Name{Repo: "team/x", Tag: "v1"}); err != nil {
			t.Fatal(err)
		}
	}
	follow := func(who string) *bufio.Scanner {
		t.Helper()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, g.url+"/v1/jobs/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+g.token[who])
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", who, resp.Status)
		}
		return bufio.NewScanner(resp.Body)
	}
	// next returns whether there is another event.
	next := func(s *bufio.Scanner) bool {
		for s.Scan() {
			if strings.HasPrefix(s.Text(), "data: ") {
				return true
			}
		}
		return false
	}
	push(0)
	stays, ends := follow("pull"), follow("team")
	if !next(stays) || !next(ends) {
		t.Fatal("no event of the job that is there")
	}
	id := strings.Split(g.token["team"], "_")[1]
	if err := g.file.Remove(ctx, id); err != nil {
		t.Fatal(err)
	}
	told := 0
	for i := byte(1); ; i++ {
		push(i)
		if !next(stays) {
			t.Fatalf("the other token's stream ended: %v", stays.Err())
		}
		if !next(ends) {
			break
		}
		if told++; told == 100 {
			t.Fatal("100 events after the token was removed, and the stream goes on")
		}
	}
	if err := ends.Err(); errors.Is(err, context.DeadlineExceeded) || err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream ended with %v", err)
	}
}
