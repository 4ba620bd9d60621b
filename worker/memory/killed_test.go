package memory_test

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"quarry/worker/memory"
)

// takerDir names, in the process that TestAKilledReclaimLeavesNothingBehind kills, the
// group to take memory from.
const takerDir = "QUARRY_TEST_TAKER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(takerDir); dir != "" {
		takeForEver(dir, os.Args[1])
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func takeForEver(dir, journal string) {
	for {
		g, err := memory.OpenGroup(memory.GroupConfig{Dir: dir, Journal: journal})
		if err != nil {
			panic(err)
		}
		os.Stdout.Write([]byte("."))
		lowerOrNot(g)
		if _, err := g.Reclaim(context.Background(), 4<<20); err != nil {
			panic(err)
		}
	}
}

// lowerOrNot takes memory by a lower limit, where there is one.
func lowerOrNot(g *memory.Group) {
	if err := g.Lower(context.Background(), 4<<20); err != nil && !errors.Is(err, fs.ErrNotExist) {
		panic(err)
	}
}

func TestALowerLimitTakesMemoryToo(t *testing.T) {
	anySwap(t, 256<<20)
	s := startGuest(t, 64)
	limit := settings(t, s.dir)
	if limit["memory.limit_in_bytes"] == "" {
		return // of version 2: it is never needed
	}
	s.pause()
	before := s.held()
	if err := s.group.Lower(t.Context(), 40<<20); err != nil {
		t.Fatal(err)
	}
	after := s.held()
	if got := before.Own() - after.Own(); got < 36<<20 { // the rest may be page cache
		t.Errorf("took %d MiB of 40", got>>20)
	}
	if got := settings(t, s.dir); got["memory.limit_in_bytes"] != limit["memory.limit_in_bytes"] {
		t.Errorf("the limit is %q now, was %q", got, limit)
	}
	s.resume()
	s.ask("sum")
}

// A worker that is killed while it takes memory leaves no lower limit, and nothing else
// that a reclaim sets.
func TestAKilledReclaimLeavesNothingBehind(t *testing.T) {
	anySwap(t, 256<<20)
	s := startGuest(t, 64)
	journal := filepath.Join(t.TempDir(), "reclaim")
	before, sum := settings(t, s.dir), s.ask("sum")
	left := 0
	for i := range 40 {
		cmd := exec.Command(os.Args[0], journal)
		cmd.Env = append(os.Environ(), takerDir+"="+s.dir)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err == nil {
			_, err = out.Read(make([]byte, 1)) // it begins
		}
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if changed(before, settings(t, s.dir)) {
			left++
		}
		if _, err := memory.OpenGroup(memory.GroupConfig{Dir: s.dir, Journal: journal}); err != nil {
			t.Fatal(err)
		}
		if now := settings(t, s.dir); changed(before, now) {
			t.Fatalf("settings are %v, were %v", now, before)
		}
		if i%10 != 9 {
			continue // a sum takes an emulated machine seconds
		}
		if got := s.ask("sum"); got != sum {
			t.Fatalf("the guest's memory has sum %s, had %s", got, sum)
		}
	}
	if left == 0 {
		t.Error("no kill came while anything was changed: the test shows nothing")
	}
	t.Logf("%d of 40 kills came while something was changed", left)
}

// settings reads what a reclaim changes.
func settings(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, name := range []string{"memory.limit_in_bytes", "memory.swappiness", "memory.swap.max"} {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		value := strings.TrimSpace(string(raw))
		if _, err := strconv.ParseInt(value, 10, 64); err == nil || value == "max" {
			out[name] = value
		}
	}
	return out
}

func changed(a, b map[string]string) bool {
	for name, value := range a {
		if b[name] != value {
			return true
		}
	}
	return false
}
