// Command demo is the main job: it converts two independent builds of a real
// image, serves them, and runs Python in each from a worker that has nothing but
// the store's URL and the public key. make demo runs it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"

	"quarry/e2e/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

const program = "import sys, platform; print('hello from Python', platform.python_version())"

// build is one of the two images and what it cost.
type build struct {
	name    string
	layout  string
	convert lab.Result
	cold    lab.Stats // the figures of a cold run
	pages   int64     // device bytes of the same run without read-ahead
}

func run(ctx context.Context) (err error) {
	first, second, err := lab.DebianImages()
	if err != nil {
		return err
	}
	l, err := lab.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	builds := []*build{{name: "demo/debian", layout: first}, {name: "demo/debian-again", layout: second}}
	data := l.Path("data")
	for _, b := range builds {
		fmt.Println("convert", b.name)
		if b.convert, err = l.Convert(ctx, data, "oci:"+b.layout, b.name); err != nil {
			return err
		}
	}
	server, err := l.Serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	fmt.Println("serve  ", server.URL)
	for i, b := range builds {
		if err := b.run(ctx, l, server.URL, data, i); err != nil {
			return err
		}
	}
	return table(builds)
}

// run runs Python on a worker with an empty cache, then on another one without
// read-ahead, whose device bytes are the pages the command really touches.
func (b *build) run(ctx context.Context, l *lab.Lab, url, data string, n int) error {
	flags := []string{"--store", url, "--trust", data + "/keys/signing.pub"}
	out, st, err := l.Run(ctx, append(flags, "--worker-dir", l.Path(fmt.Sprintf("w%d", n))), b.name, "python3", "-c", program)
	if err != nil {
		return err
	}
	fmt.Printf("run     %s: %s\n", b.name, strings.TrimSpace(out))
	b.cold = st
	_, st, err = l.Run(ctx, append(flags, "--worker-dir", l.Path(fmt.Sprintf("p%d", n)), "--read-ahead", "0"), b.name, "python3", "-c", program)
	b.pages = st.DeviceBytes
	return err
}

func table(builds []*build) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', tabwriter.AlignRight)
	row := func(label string, value func(*build) string) {
		fmt.Fprintf(w, "%s\t", label)
		for _, b := range builds {
			fmt.Fprintf(w, "%s\t", value(b))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	row("", func(b *build) string { return b.name })
	row("image size, MB", func(b *build) string { return mb(b.cold.ImageSizeBytes) })
	row("wire bytes, MB", func(b *build) string { return mb(b.cold.WireBytes) })
	row("pages touched, MB", func(b *build) string { return mb(b.pages) })
	row("wire / pages", func(b *build) string { return ratio(b.cold.WireBytes, b.pages) })
	row("requests", func(b *build) string { return fmt.Sprint(b.cold.Requests) })
	row("time to first output, s", func(b *build) string { return fmt.Sprintf("%.2f", b.cold.FirstOutputMillis/1000) })
	row("new plain bytes, MB", func(b *build) string { return mb(b.convert.NewPlainBytes) })
	row("bytes added to the store, MB", func(b *build) string { return mb(b.convert.NewStoredBytes) })
	row("dedup ratio", func(b *build) string { return ratio(b.convert.PlainBytes, max(b.convert.NewPlainBytes, 1)) })
	return w.Flush()
}

func mb(n int64) string { return fmt.Sprintf("%.2f", float64(n)/1e6) }

func ratio(a, b int64) string { return fmt.Sprintf("%.2f", float64(a)/float64(b)) }
