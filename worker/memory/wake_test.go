package memory_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/worker/memory"
	"quarry/worker/sentry/sentrytest"
)

// The memory of a guest that waits goes to swap and comes back before it runs on, and
// nothing in it has changed.
func TestAGuestThatWaitsGivesItsMemoryAndGetsItBack(t *testing.T) {
	for _, kind := range []string{"file", "zram"} {
		t.Run(kind, func(t *testing.T) {
			const mib = 200
			swapOn(t, kind, 2*mib<<20)
			s := startGuest(t, mib)
			before := s.ask("sum")
			s.pause()
			var w memory.Waiting
			box, image := s.sandbox("one"), imageFile(t)
			box.Images = func(context.Context) []*memory.File { return []*memory.File{image} }
			w.Add(box, time.Now(), time.Time{})
			full := s.held()
			took := w.Reclaim(t.Context(), 1<<40)
			empty := s.held()
			if len(took) != 1 || took[0].Err != nil || took[0].Bytes() < mib<<20*9/10 || empty.Shmem > mib<<20/10 {
				t.Fatalf("took %+v, held %+v before and %+v after", took, full, empty)
			}
			got, err := w.Wake(t.Context(), "one")
			if err != nil || got.Bytes < mib<<20*9/10 {
				t.Errorf("brought back %+v, %v", got, err)
			}
			back := s.held()
			if back.Shmem < mib<<20*9/10 {
				t.Errorf("held %+v after the wake", back)
			}
			if err := image.Close(); !errors.Is(err, os.ErrClosed) {
				t.Errorf("the image's file was open: %v", err)
			}
			s.resume()
			after := s.ask("sum")
			if after != before {
				t.Errorf("the guest's memory has sum %s, had %s", after, before)
			}
			t.Logf("%s: held %+v, then %+v, then %+v", kind, full, empty, back)
			t.Logf("%s: taken %d MiB (%d by the Sentry) in %v, back %d MiB in %v", kind, took[0].Bytes()>>20, took[0].Reduced>>20, took[0].Took, got.Bytes>>20, got.Took)
		})
	}
}

// What is wanted is taken, not all.
func TestAPartIsTaken(t *testing.T) {
	const mib = 128
	anySwap(t, 2*mib<<20)
	s := startGuest(t, mib)
	s.pause()
	var w memory.Waiting
	w.Add(s.sandbox("one"), time.Now(), time.Time{})
	took := w.Reclaim(t.Context(), 48<<20)
	if n := took[0].Bytes(); took[0].Err != nil || n < 48<<20 || n > 96<<20 {
		t.Errorf("took %+v of 48 MiB", took)
	}
	got, err := w.Wake(t.Context(), "one")
	if err != nil {
		t.Error(err)
	}
	t.Logf("taken %d MiB in %v, back %d MiB in %v", took[0].Bytes()>>20, took[0].Took, got.Bytes>>20, got.Took)
	s.resume()
	s.ask("sum")
}

// The files of its image that a guest uses are among what is brought back.
func TestAGuestsImageFilesAreFound(t *testing.T) {
	root := sentrytest.Root(t)
	box := sentrytest.StartIn(t, root)
	if n := count(t, filepath.Join(root, "bin/busybox"), []int{box.PID}, root); n != 1 {
		t.Errorf("the guest's program was found %d times", n)
	}
}

// When swap is full, what fits is taken, and the guest lives on.
func TestFullSwapTakesWhatFits(t *testing.T) {
	const mib = 128
	anySwap(t, 40<<20)
	s := startGuest(t, mib)
	before := s.ask("sum")
	s.pause()
	var w memory.Waiting
	w.Add(s.sandbox("one"), time.Now(), time.Time{})
	took := w.Reclaim(t.Context(), 1<<40)
	if n := took[0].Bytes(); took[0].Err != nil || n < 30<<20 || n > 45<<20 {
		t.Errorf("took %+v with 40 MiB of swap", took)
	}
	if _, err := w.Wake(t.Context(), "one"); err != nil {
		t.Error(err)
	}
	s.resume()
	if after := s.ask("sum"); after != before {
		t.Errorf("the guest's memory has sum %s, had %s", after, before)
	}
}

// A wake that may take no time resumes at once; the rest comes while the guest runs, and
// ends when it is paused again.
func TestTheRestComesWhileTheGuestRuns(t *testing.T) {
	const mib = 128
	anySwap(t, 2*mib<<20)
	s := startGuest(t, mib)
	before := s.ask("sum")
	for range 3 {
		s.pause()
		var w memory.Waiting
		w.Add(s.sandbox("one"), time.Now(), time.Time{})
		w.Reclaim(t.Context(), 1<<40)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		got, err := w.Wake(ctx, "one")
		cancel()
		if err != nil || !got.Rest {
			t.Errorf("brought back %+v, %v", got, err)
		}
		s.resume()
		for end := time.Now().Add(time.Minute); s.held().Shmem < mib<<20*9/10; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("held %+v: the rest does not come", s.held())
			}
		}
		s.pause()
		w.Add(s.sandbox("one"), time.Now(), time.Time{})
		w.Reclaim(t.Context(), 1<<40)
		ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
		w.Wake(ctx, "one")
		cancel()
		w.Add(s.sandbox("one"), time.Now(), time.Time{}) // ends the rest
		w.Drop("one")
		s.resume()
	}
	if after := s.ask("sum"); after != before {
		t.Errorf("the guest's memory has sum %s, had %s", after, before)
	}
}

// BenchmarkWake is how long a guest of 200 MiB needs until it has touched all of its
// memory again, after all was taken: by faults of its own, or prefetched.
func BenchmarkWake(b *testing.B) {
	const mib = 200
	for _, kind := range []string{"zram", "file"} {
		b.Run(kind, func(b *testing.B) {
			swapOn(b, kind, 2*mib<<20)
			s := startGuest(b, mib)
			for _, arm := range []struct {
				name, how string
				fetch     bool
			}{{"faults-scattered", "scattered", false}, {"faults-inorder", "inorder", false}, {"prefetch", "scattered", true}} {
				b.Run(arm.name, func(b *testing.B) {
					var fetch, touch, reclaim time.Duration
					n := 0
					for b.Loop() {
						b.StopTimer()
						s.pause()
						var w memory.Waiting
						w.Add(s.sandbox("one"), time.Now(), time.Time{})
						took := w.Reclaim(b.Context(), 1<<40)
						if len(took) != 1 || took[0].Bytes() < mib<<20*9/10 {
							b.Fatalf("took %+v", took)
						}
						reclaim += took[0].Took
						b.StartTimer()
						if arm.fetch {
							got, err := w.Wake(b.Context(), "one")
							if err != nil {
								b.Fatal(err)
							}
							fetch += got.Took
						}
						s.resume()
						touch += s.touch(arm.how)
						n++
					}
					ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 / float64(n) }
					b.ReportMetric(ms(fetch), "ms-prefetch")
					b.ReportMetric(ms(touch), "ms-guest")
					b.ReportMetric(ms(reclaim), "ms-reclaim")
				})
			}
		})
	}
}

// imageFile is a file of 1 MiB that is in memory.
func imageFile(t testing.TB) *memory.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return memory.OpenImage(f)
}

// Page cache stays where it is while a guest's memory is taken, whoever it is charged
// to: of an image it is of use to others. So what is asked for is not given in pages of
// files, and those do not count.
func TestPageCacheIsLeftAlone(t *testing.T) {
	const mib, cached = 64, 32 << 20
	var st unix.Statfs_t
	if err := unix.Statfs(os.TempDir(), &st); err != nil || st.Type == unix.TMPFS_MAGIC {
		need.Missing(t, "a temporary folder on a disk, whose files are page cache and nothing else")
	}
	anySwap(t, 2*mib<<20)
	s := startGuest(t, mib)
	path := filepath.Join(t.TempDir(), "image")
	of, err := os.Create(path)
	if err == nil {
		_, err = of.Write(make([]byte, cached))
		err = errors.Join(err, of.Sync(), unix.Fadvise(int(of.Fd()), 0, 0, unix.FADV_DONTNEED))
	}
	if err != nil {
		t.Fatal(err)
	}
	f := memory.OpenImage(of)
	defer f.Close()
	// Read from within the group, as a Sentry does, twice, as what is used again.
	cat := exec.Command("/bin/sh", "-c", `echo $$ >"$1/cgroup.procs" && cat "$2" "$2" >/dev/null`, "sh", s.dir, path)
	if out, err := cat.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s.pause()
	var w memory.Waiting
	w.Add(s.sandbox("one"), time.Now(), time.Time{})
	before := s.held()
	took := w.Reclaim(t.Context(), 1<<40)
	after := s.held()
	if len(took) != 1 || took[0].Err != nil || took[0].Bytes() < mib<<20*9/10 || took[0].Bytes() > before.Own() {
		t.Errorf("took %+v of %+v", took, before)
	}
	// Until the kernel is told that it has enough it may have begun with the page cache.
	if here := memory.Bytes(f.Present(memory.Range{Len: cached})); before.File < cached || here < cached*3/4 || after.File < before.File*3/4 {
		t.Errorf("%d bytes of the file's %d are left; held %+v before and %+v after", here, cached, before, after)
	}
	if _, err := w.Wake(t.Context(), "one"); err != nil {
		t.Error(err)
	}
	s.resume()
	s.ask("sum")
}

// What the guest did not touch since it was taken is left in swap at its next wake.
func TestWhatIsNotUsedStaysInSwap(t *testing.T) {
	const mib = 128
	anySwap(t, 2*mib<<20)
	s := startGuest(t, mib)
	before := s.ask("sum")
	var back []int64
	for range 3 {
		s.pause()
		var w memory.Waiting
		box := s.sandbox("one")
		box.Processes = s.processes
		w.Add(box, time.Now(), time.Time{})
		s.takeAll(&w)
		got, err := w.Wake(t.Context(), "one")
		if err != nil {
			t.Error(err)
		}
		back = append(back, got.Bytes)
		s.resume()
		s.touch("quarter")
	}
	t.Logf("brought back %d", back)
	if back[0] < mib<<20*9/10 || back[2] < mib<<20/4*9/10 || back[2] > mib<<20/2 {
		t.Errorf("brought back %d bytes: want all, and then what is used", back)
	}
	if after := s.ask("sum"); after != before {
		t.Errorf("the guest's memory has sum %s, had %s", after, before)
	}
}

// Half of each is taken before more of any. The kernel takes more until it is told that it
// has enough, by some 80 MiB on a fast disk, of which each has several times as much.
func TestHalfOfEachIsTakenFirst(t *testing.T) {
	const mib = 512
	anySwap(t, 4*mib<<20)
	var w memory.Waiting
	guests := map[string]*guest{"first": startGuest(t, mib), "second": startGuest(t, mib)}
	for id, s := range guests {
		s.pause()
		w.Add(s.sandbox(id), time.Now(), time.Time{})
	}
	took := w.Reclaim(t.Context(), mib<<20)
	if len(took) != 2 || took[0].ID == took[1].ID {
		t.Fatalf("took %+v", took)
	}
	for _, x := range took {
		if x.Bytes() < mib<<20*3/10 || x.Bytes() > mib<<20*8/10 {
			t.Errorf("took %d MiB of %s, which has %d", x.Bytes()>>20, x.ID, mib)
		}
	}
	for id, s := range guests {
		if _, err := w.Wake(t.Context(), id); err != nil {
			t.Error(err)
		}
		s.resume()
	}
}

// What a guest uses at every step is mapped before it runs, for writing too, and what it
// does not use is not.
func TestWhatIsAlwaysUsedIsMapped(t *testing.T) {
	const mib, rounds, pages = 128, 5, 128 << 20 / 4 / 4096 // pages are what it uses
	anySwap(t, 2*mib<<20)
	s := startGuest(t, mib)
	var w memory.Waiting
	before := s.ask("sum")
	var mapped, faults [rounds]int64
	for i := range rounds {
		s.pause()
		box := s.sandbox("one")
		box.Processes = s.processes
		w.Add(box, time.Now(), time.Time{})
		s.takeAll(&w)
		if _, err := w.Wake(t.Context(), "one"); err != nil {
			t.Error(err)
		}
		pids, err := s.processes()
		if err == nil {
			mapped[i], err = s.file.Mapped(t.Context(), pids)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.resume()
		had := s.faults()
		s.touch("rewrite")
		faults[i] = s.faults() - had
	}
	t.Logf("mapped %d bytes before it runs; writing to %d pages took %d faults", mapped, pages, faults)
	if used := int64(mib << 20 / 4); mapped[0] > used/4 || mapped[rounds-1] < used*3/4 || mapped[rounds-1] > used*3/2 {
		t.Errorf("mapped %d bytes before each wake: want nothing at first, and in the end most of %d", mapped, used)
	}
	if faults[rounds-1] > faults[0]/2 { // how many pages one fault maps is the kernel's choice
		t.Errorf("writing to %d pages took %d faults", pages, faults)
	}
	if after := s.ask("sum"); after != before {
		t.Errorf("the guest's memory has sum %s, had %s", after, before)
	}
}
