package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"quarry/e2e/lab"
)

// measureCold runs one small command on workers that have never seen the image
// and compares the bytes on the wire with the pages the command touches.
func measureCold(ctx context.Context, b *bench) (err error) {
	l := b.lab
	layout, _, err := lab.DebianImages()
	if err != nil {
		return err
	}
	data := l.Path("cold")
	if _, err := l.Convert(ctx, data, "oci:"+layout, "bench/debian"); err != nil {
		return err
	}
	server, err := l.Serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	proxy, err := newProxy(strings.TrimPrefix(server.URL, "http://"))
	if err != nil {
		return err
	}
	defer proxy.close()
	var wire, pages, plain, requests, first []float64
	for i := range rounds {
		flags := func(kind string) []string {
			return []string{"--store", proxy.url(), "--trust", data + "/keys/signing.pub", "--worker-dir", l.Path(fmt.Sprintf("%s%d", kind, i))}
		}
		before := proxy.bytes.Load()
		_, st, err := l.Run(ctx, flags("c"), "bench/debian", "python3", "-c", "print(1)")
		if err != nil {
			return err
		}
		wire = append(wire, float64(proxy.bytes.Load()-before))
		plain = append(plain, float64(st.ChunkPlainBytes))
		requests = append(requests, float64(st.Requests))
		first = append(first, st.FirstOutputMillis)
		_, st, err = l.Run(ctx, append(flags("p"), "--read-ahead", "0"), "bench/debian", "python3", "-c", "print(1)")
		if err != nil {
			return err
		}
		pages = append(pages, float64(st.DeviceBytes))
	}
	touched := median(pages)
	b.figure("cold python3 -c 'print(1)': pages touched", fmt.Sprintf("%.2f MB", touched/1e6))
	b.atMost("cold: wire bytes ÷ pages touched", median(wire)/touched, 1.3, "×")
	b.figure("cold: plain chunk bytes ÷ pages touched", fmt.Sprintf("%.2f", median(plain)/touched))
	b.figure("cold: requests", fmt.Sprintf("%.0f", median(requests)))
	b.figure("cold: time to first output", fmt.Sprintf("%.2f s", median(first)/1000))
	return nil
}

// proxy counts all bytes between a worker and the store, both ways.
type proxy struct {
	bytes  atomic.Int64
	l      net.Listener
	target string
	wg     sync.WaitGroup
}

func newProxy(target string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{l: l, target: target}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) url() string { return "http://" + p.l.Addr().String() }

func (p *proxy) close() {
	p.l.Close()
	p.wg.Wait()
}

func (p *proxy) accept() {
	for {
		conn, err := p.l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(conn) })
	}
}

func (p *proxy) serve(down net.Conn) {
	defer down.Close()
	up, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer up.Close()
	var wg sync.WaitGroup
	copyAll := func(to, from net.Conn) {
		io.Copy(countWriter{to, &p.bytes}, from)
		to.(*net.TCPConn).CloseWrite()
	}
	wg.Go(func() { copyAll(up, down) })
	wg.Go(func() { copyAll(down, up) })
	wg.Wait()
}

type countWriter struct {
	io.Writer
	n *atomic.Int64
}

func (w countWriter) Write(b []byte) (int, error) {
	n, err := w.Writer.Write(b)
	w.n.Add(int64(n))
	return n, err
}
