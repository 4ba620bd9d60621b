package main

import (
	"context"
	"errors"
	"fmt"

	"quarry/e2e/lab"
	"quarry/e2e/lab/proxy"
)

const (
	// maxWirePages is the limit of all bytes on the wire against the pages of the
	// device that wireCommand touches.
	maxWirePages = 1.3
	wireCommand  = "python3 -c 'print(1)'"
	wireImage    = "bench/debian"
)

var wireArgs = []string{"python3", "-c", "print(1)"}

// measureWirePages runs one small command on workers that have never seen the image
// and know of no run, and compares the bytes on the wire with the pages that the
// command touches.
func measureWirePages(ctx context.Context, b *bench) (err error) {
	l := b.lab
	layout, _, err := lab.DebianImages()
	if err != nil {
		return err
	}
	data := l.Path("debian")
	if _, err := l.Convert(ctx, data, "oci:"+layout, wireImage); err != nil {
		return err
	}
	server, err := l.Serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	p, err := proxy.New(proxy.Config{Target: server.Addr()})
	if err != nil {
		return err
	}
	defer p.Close()
	run := func(kind string, i int, flags ...string) (st lab.Stats, err error) {
		dir := l.Path(fmt.Sprintf("%s%d", kind, i))
		defer func() { err = errors.Join(err, l.EndBelow(dir)) }()
		flags = append(flags, "--no-trace", "--store", p.URL(), "--trust", data+"/keys/signing.pub", "--worker-dir", dir)
		_, st, err = l.Run(ctx, flags, wireImage, wireArgs...)
		return st, err
	}
	var wire, pages, plain, requests []float64
	for i := range rounds {
		before := p.Bytes()
		st, err := run("c", i)
		if err != nil {
			return err
		}
		// The reader has ended: what it says at its end is counted too.
		wire = append(wire, float64(p.Bytes()-before))
		plain = append(plain, float64(st.ChunkPlainBytes))
		requests = append(requests, float64(st.Requests))
		if st, err = run("p", i, "--read-ahead", "0"); err != nil {
			return err
		}
		pages = append(pages, float64(st.DeviceBytes))
	}
	touched := median(pages)
	name := "cold " + wireCommand + ": "
	b.figure(name+"pages touched", fmt.Sprintf("%.2f MB", touched/1e6))
	b.atMost(name+"wire bytes ÷ pages touched", median(wire)/touched, maxWirePages, "×")
	b.figure(name+"plain chunk bytes ÷ pages touched", fmt.Sprintf("%.2f", median(plain)/touched))
	b.figure(name+"requests", fmt.Sprintf("%.0f", median(requests)))
	return nil
}
