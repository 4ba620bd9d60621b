package e2e_test

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"quarry/internal/need"
	"quarry/worker/sandbox"
)

// TestTheWorkersPageInABrowser looks at sandboxes that run, wait and have ended, with
// and without scripts, and at what a guest's maker may put on the page.
func TestTheWorkersPageInABrowser(t *testing.T) {
	need.Tool(t, "chromium")
	r := newWorkerRig(t, "debian")
	c := r.client()
	make := func(group string) string {
		sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128, Group: group}, "")
		check(t, err)
		return sb.ID
	}
	runs, waits, ended := make(`<script>alert("made")</script>`), make("g"), make("g")
	r.pause(t.Context(), c, waits)
	_, err := c.Delete(t.Context(), ended)
	check(t, err)
	url := strings.Replace(r.url, "http://", "http://x:"+r.token+"@", 1) + "/"

	b := openBrowser(t)
	b.do(scripts(false), chromedp.Navigate(url))
	b.await(nil, runs, waits, "running", "paused", ended, sandbox.ReasonDeleted, `<script>alert("made")</script>`)
	b.shoot("worker-light", 1280, "light")
	b.shoot("worker-phone", 390, "dark")
	b.do(scripts(true), chromedp.Navigate(url))
	b.await(nil, waits)
	_, err = c.Resume(t.Context(), waits)
	check(t, err)
	_, err = c.Delete(t.Context(), runs)
	check(t, err)
	b.await(nil, "ended 2") // the page has looked again by itself
	b.shoot("worker-dark", 1280, "dark")
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.said) > 0 {
		t.Errorf("the browser says %q", b.said)
	}
}
