package agentbench

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"quarry/internal/swap"
)

func TestArmsAndSwapAreReadAsWritten(t *testing.T) {
	size := func(s string) (int64, error) { n, err := strconv.ParseInt(s, 10, 64); return n, err }
	for text, want := range map[string]Swap{"none": {"none", 0}, "file": {"file", 0}, "zram:2097152": {"zram", 2 << 20}} {
		if got, err := ParseSwap(text, size); err != nil || got != want {
			t.Errorf("%s: got %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "disk", "none:4", "file:", "file:x", "zram:1", "file:-1"} {
		if got, err := ParseSwap(text, size); err == nil {
			t.Errorf("%s: got %+v and no error", text, got)
		}
	}
	if got, err := ParseArms("reclaim,resident"); err != nil || !slices.Equal(got, []Arm{ArmReclaim, ArmResident}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := ParseArms("reclaim,"); err == nil {
		t.Errorf("got %v and no error", got)
	}
}

func TestQuantilesAreOfWhatWasMeasured(t *testing.T) {
	var all []float64
	for i := range 100 {
		all = append(all, float64(i+1))
	}
	for q, want := range map[float64]float64{0.5: 50, 0.95: 95, 0.99: 99, 1: 100} {
		if got := quantile(all, q); got != want {
			t.Errorf("%g of 1 to 100: got %g, want %g", q, got, want)
		}
	}
	if got := quantile(all[:1], 0.99); got != 1 {
		t.Errorf("of one: got %g", got)
	}
	if got := quantile(nil, 0.5); got != 0 {
		t.Errorf("of none: got %g", got)
	}
}

func TestThePlotIsWellFormed(t *testing.T) {
	for name, r := range map[string]Report{
		"nothing": {},
		"no wake": {Results: []Result{{Arm: ArmResident}}},
		"all":     {Agents: 2, Results: []Result{{Arm: ArmHibernate, Wakes: []float64{900, 4000}, P95: 4000}, {Arm: ArmReclaim, Wakes: []float64{0, 0.5, 10}, P95: 10}}},
		"alike":   {Results: []Result{{Arm: ArmPaused, Wakes: []float64{10}, P95: 10}}},
	} {
		var b bytes.Buffer
		if err := r.WriteSVG(&b); err != nil {
			t.Fatal(err)
		}
		text := b.String()
		d := xml.NewDecoder(&b)
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") || strings.Contains(text, "%!") {
			t.Errorf("%s: a number is none: %s", name, text)
		}
	}
}

func TestTheImageIsALayoutOfWhatItNames(t *testing.T) {
	dir := t.TempDir()
	if err := writeLayout(dir, []byte("program")); err != nil {
		t.Fatal(err)
	}
	blobs, err := os.ReadDir(filepath.Join(dir, "blobs", "sha256"))
	if err != nil || len(blobs) != 3 {
		t.Errorf("%d blobs, %v", len(blobs), err)
	}
}

// modelOf serves a model of one agent whose waits are short.
func modelOf(t *testing.T, patience time.Duration, wake func(context.Context, string) error) (*model, string) {
	t.Helper()
	life, end := context.WithCancel(t.Context())
	m := newModel(life, Config{Agents: 1, WaitScale: 0.0001, Patience: patience})
	m.wake = wake
	s := httptest.NewServer(m)
	t.Cleanup(func() { end(); m.all.Wait(); s.Close() })
	return m, s.URL
}

func post(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Post(url, "", strings.NewReader("question"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, _ := io.ReadAll(resp.Body)
	word, _, _ := strings.Cut(string(raw), "\n")
	return resp.StatusCode, word
}

func TestAWakeIsCountedOnce(t *testing.T) {
	woken := 0
	m, url := modelOf(t, DefaultPatience, func(context.Context, string) error { woken++; return nil })
	for range 2 { // the second as after a cut connection
		if code, word := post(t, url+"/ask?agent=0&step=0"); code != 200 || word != "go" {
			t.Fatalf("%d %s", code, word)
		}
	}
	for range 2 {
		post(t, url+"/ack?agent=0&step=0&us=12&wrong=0&page=0")
	}
	if code, _ := post(t, url+"/ask?agent=0&step=1"); code != 200 {
		t.Error(code)
	}
	post(t, url+"/ack?agent=0&step=1&us=12&wrong=2&page=7")
	close(m.finish)
	if _, word := post(t, url+"/ask?agent=0&step=2"); word != "finish" {
		t.Error(word)
	}
	post(t, url+"/ack?agent=0&step=2&us=0&wrong=0&page=0")
	for _, bad := range []string{"/ask?agent=1&step=0", "/ask?agent=-1&step=0", "/ask?agent=0", "/ask?agent=0&step=1", "/other?agent=0&step=2"} {
		if code, _ := post(t, url+bad); code == 200 {
			t.Errorf("%s is answered", bad)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.wakes) != 2 || m.wrong != 2 || m.failures["wrong bytes"] != 1 || !m.agents[0].checked || woken != 3 {
		t.Errorf("%d wakes, %d wrong pages, failures %v, woken %d", len(m.wakes), m.wrong, m.failures, woken)
	}
	if w := m.wakes[0]; w.touch != 12*time.Microsecond || w.took <= 0 {
		t.Errorf("got %+v", w)
	}
}

func TestAnAgentThatIsNotWokenIsAFailure(t *testing.T) {
	m, url := modelOf(t, DefaultPatience, func(context.Context, string) error { return fmt.Errorf("no disk") })
	post(t, url+"/ask?agent=0&step=0")
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failures["not woken"] != 1 || len(m.told) != 1 {
		t.Errorf("failures %v, %v", m.failures, m.told)
	}
}

// An agent that has its answer and says nothing is a failure once the patience with it is
// at its end.
func TestPatienceWithAnAgentIsAsGiven(t *testing.T) {
	m, url := modelOf(t, 20*time.Millisecond, nil)
	post(t, url+"/ask?agent=0&step=0")
	m.all.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failures["no sign of life"] != 1 || !strings.Contains(m.told[0], "20ms") {
		t.Errorf("failures %v, %v", m.failures, m.told)
	}
}

// Swap that could not be switched off is kept, as the kernel reads it, and told of.
func TestSwapThatStaysOnIsKept(t *testing.T) {
	r := run{dir: t.TempDir()}
	r.swap = &swapArea{Swap: Swap{Kind: "file", Size: 1 << 20}, path: r.path("swap"), isOn: true}
	if err := swap.MakeFile(r.swap.path, r.swap.Size); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(r.path("reclaim"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.swap.off(); err == nil || !strings.Contains(err.Error(), r.swap.path+" is kept") { // it never was on
		t.Errorf("got %v", err)
	}
	if err := r.clear(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(r.dir); err != nil || len(left) != 1 || left[0].Name() != "swap" {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A worker takes no sandbox that may have more than all have together.
func TestNoAgentMayHaveMoreThanAllHave(t *testing.T) {
	for memory, want := range map[int64]int64{64 << 20: 64, 200 << 20: 200, 2 << 30: 200} {
		r := run{Config: Config{Agents: 2, AgentMemory: 8 << 20, Memory: memory}}
		if got := r.spec(0); got.MemoryMB != want || got.MemoryRequest > got.MemoryMB {
			t.Errorf("of %d MiB: an agent may have %d MiB and is promised %d, want %d", memory>>20, got.MemoryMB, got.MemoryRequest, want)
		}
	}
}

// A person's own store and keys are not those of the image that the bench makes.
func TestTheStoreOfTheEnvironmentIsNotMeasured(t *testing.T) {
	ours := []string{"PATH=/bin", "QUARRY_TRUST=/keys", "QUARRY_STORE=http://store", "QUARRY_ATTACH=fuse", "QUARRY_TRUSTED=no"}
	want := []string{"PATH=/bin", "QUARRY_ATTACH=fuse", "QUARRY_TRUSTED=no"}
	if got := environment(ours); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
