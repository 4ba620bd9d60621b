package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	browserlog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"quarry/internal/need"
	"quarry/internal/testimage"
)

// browser is a headless Chromium with one tab.
type browser struct {
	t    *testing.T
	ctx  context.Context
	mu   sync.Mutex // guards said
	said []string   // what a browser complains of: refused loads, errors of scripts, dialogs
}

func openBrowser(t *testing.T) *browser {
	t.Helper()
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(need.Tool(t, "chromium")),
		chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(time.Minute), chromedp.Flag("disable-dev-shm-usage", true))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), opts...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	b := &browser{t: t, ctx: ctx}
	err := chromedp.Listen(ctx, func(ev any) {
		switch e := ev.(type) {
		case *browserlog.EventEntryAdded:
			b.complain(string(e.Entry.Level) + ": " + e.Entry.Text + " " + e.Entry.URL)
		case *runtime.EventExceptionThrown:
			b.complain("exception: " + e.ExceptionDetails.Text)
		case *page.EventJavascriptDialogOpening:
			b.complain("dialog: " + e.Message)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *browser) complain(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.said = append(b.said, text)
}

func (b *browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

// scripts lets pages run scripts or not.
func scripts(on bool) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !on})
		return err
	})
}

func colours(scheme string) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
		return err
	})
}

func (b *browser) text() string {
	b.t.Helper()
	text, err := chromedp.Run(b.ctx, chromedp.Text("body"))
	if err != nil {
		b.t.Fatal(err)
	}
	return text
}

// await waits until the tab shows all of want. between, when not nil, is what a
// person does who waits.
func (b *browser) await(between func(), want ...string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 2*time.Minute)
	defer cancel()
	for {
		text, missing := b.text(), ""
		for _, w := range want {
			if !strings.Contains(text, w) {
				missing = w
			}
		}
		if missing == "" {
			return
		}
		select {
		case <-ctx.Done():
			b.t.Fatalf("the tab never shows %q:\n%s", missing, text)
		case <-time.After(200 * time.Millisecond):
		}
		if between != nil {
			between()
		}
	}
}

// shoot keeps a picture of the tab in the folder of artifacts.
func (b *browser) shoot(name string, width int64, scheme string) {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(width, 900), colours(scheme))
	wide, err := chromedp.Run(b.ctx, chromedp.Evaluate[int64]("document.documentElement.scrollWidth"))
	if err != nil || wide > width {
		b.t.Errorf("%s: the page is %d wide in a window of %d, error %v", name, wide, width, err)
	}
	png, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
	if err != nil {
		b.t.Fatal(err)
	}
	dir := os.Getenv("QUARRY_ARTIFACTS")
	if dir == "" {
		dir = b.t.ArtifactDir()
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "page-"+name+".png"), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// layer has n files of size bytes each, the same for the same name.
func layer(name string, n, size int) testimage.Layer {
	rnd := rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%-32s", name))))
	var y testimage.Layer
	for i := range n {
		body := make([]byte, size)
		rnd.Read(body)
		y.Entries = append(y.Entries, testimage.File(fmt.Sprintf("%s/%d", name, i), string(body)))
	}
	return y
}

func TestThePageInABrowser(t *testing.T) {
	need.Tool(t, "chromium")
	l := newLab(t)
	ctx, data := t.Context(), l.Path("data")
	token := func(flags ...string) string {
		t.Helper()
		out, err := l.Quarry(ctx, append([]string{"token", "create", "--data", data}, flags...)...)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(out[strings.LastIndex(out, "qry_"):])
	}
	convert := func(name string, layers ...testimage.Layer) error {
		_, err := l.Convert(ctx, data, testimage.Build(t, layers...).Source(""), name)
		return err
	}
	admin, team := token("--scope", "admin"), token("--scope", "pull", "--repo", "team")
	server, err := l.Serve(context.WithoutCancel(ctx), data, "--tokens", filepath.Join(data, "keys", "tokens.json"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	debian, python := layer("debian", 40, 60_000), layer("python", 25, 50_000)
	for _, c := range []struct {
		name   string
		layers []testimage.Layer
	}{
		{"library/debian:12", []testimage.Layer{debian}},
		{"team/python:3.12", []testimage.Layer{debian, python}},
		{"team/trainer:2026-11-30", []testimage.Layer{debian, python, layer("app", 3, 300_000)}},
		{"research/a-repository-with-a-long-name/and/many/components:and-a-tag-1.2.3-rc1", []testimage.Layer{layer("research", 12, 90_000)}},
	} {
		if err := convert(c.name, c.layers...); err != nil {
			t.Fatal(err)
		}
	}
	const evil = `<script>alert(1)</script><img src=x onerror=alert(2)>`
	bad := testimage.Layer{Entries: []testimage.Entry{testimage.File("a/"+evil+strings.Repeat("x", 5000), "")}}
	if convert("team/broken:1", bad) == nil {
		t.Fatal("an image with too long a name was converted")
	}

	login := func(token string) string { return strings.Replace(server.URL, "://", "://me:"+token+"@", 1) + "/" }
	b := openBrowser(t)
	t.Run("without scripts", func(t *testing.T) {
		b.t = t
		b.do(scripts(false), chromedp.Navigate(login(admin)))
		b.await(func() { b.do(chromedp.Reload()) }, "library/debian:12", "ready", "3 images", "team/broken:1", "<script>alert(1)", "bytes in packs", "Reload for newer figures")
		b.shoot("without-scripts", 1280, "light")
	})
	t.Run("with scripts", func(t *testing.T) {
		b.t = t
		b.do(scripts(true), chromedp.Navigate(login(admin)))
		b.await(nil, "library/debian:12", "live")
		if err := convert("team/live:1", debian, layer("live", 2, 70_000)); err != nil {
			t.Fatal(err)
		}
		b.await(nil, "team/live:1", "of 5 names", "4 images") // nobody loads the page again
		for _, scheme := range []string{"light", "dark"} {
			b.shoot("wide-"+scheme, 1280, scheme)
			b.shoot("narrow-"+scheme, 400, scheme)
		}
	})
	if len(b.said) > 0 {
		t.Errorf("the browser complains: %q", b.said)
	}
	t.Run("of one team", func(t *testing.T) {
		b := openBrowser(t)
		b.do(chromedp.Navigate(login(team)))
		b.await(nil, "team/trainer:2026-11-30", "live", "3 images")
		for _, other := range []string{"library", "research", "bytes in packs"} {
			if text := b.text(); strings.Contains(text, other) {
				t.Errorf("a token of team is shown %q:\n%s", other, text)
			}
		}
		b.shoot("team", 1280, "light")
		b.do(chromedp.Navigate(server.URL + "/?repo=trainer"))
		b.await(nil, "1 to 1 of 1 names")
	})
	if log, err := os.ReadFile(l.Path("serve.log")); err != nil || bytes.Contains(log, []byte("qry_")) {
		t.Errorf("the log has a token in it, or cannot be read: %v", err)
	}
}
