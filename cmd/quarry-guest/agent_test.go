package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

func TestAWrongByteOfAnAgentsMemoryIsFound(t *testing.T) {
	h, err := hold(4<<20, 7)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		h.touchHot(25)
		h.touchNext(10)
	}
	if w := h.take(); w.pages != 0 {
		t.Fatalf("nothing is wrong, and it found %+v", w)
	}
	hot, cold := int(h.runs[3])*run, int(h.runs[len(h.runs)-1])*run+2
	h.b[hot*pageSize+pageSize-1] ^= 1
	h.b[cold*pageSize] ^= 1
	h.touchHot(25)
	if w := h.take(); w != (wrong{1, hot}) {
		t.Errorf("got %+v, want page %d", w, hot)
	}
	for range 4 {
		h.touchNext(25)
	}
	if w := h.take(); w != (wrong{1, cold}) {
		t.Errorf("got %+v in turn, want page %d", w, cold)
	}
	h.checkAll()
	if w := h.take(); w != (wrong{1, cold}) {
		t.Errorf("got %+v of all, want page %d", w, cold)
	}
}

// An agent asks the same again when its connection is cut, and tells each step once it
// has touched its memory.
func TestAnAgentAsksAgainWhenItsConnectionIsCut(t *testing.T) {
	var mu sync.Mutex
	var got []string
	asks := 0
	done := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fmt.Sprintf("%s %s %s", r.URL.Path, r.FormValue("step"), r.FormValue("wrong")))
		if len(got) > 5 {
			select {
			case <-done:
			default:
				close(done)
			}
			http.Error(w, "enough", http.StatusGone)
			return
		}
		if asks++; asks == 3 {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprintln(w, map[bool]string{true: "finish", false: "go"}[len(got) == 4])
	}))
	defer s.Close()
	go runAgent([]string{"model=" + s.Listener.Addr().String(), "index=1", "mib=1", "hot=50", "cold=10", "body=100000", "seed=3"}) // ends with the test's process
	<-done
	mu.Lock()
	defer mu.Unlock()
	want := []string{"/ask 0 ", "/ack 0 0", "/ask 1 ", "/ask 1 ", "/ack 1 0", "/ask 2 "}
	for i, w := range want {
		if got[i] != w {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
}
