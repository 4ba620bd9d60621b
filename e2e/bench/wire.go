package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
)

// maxWire is the limit of what a worker fetches of an image before its first
// read, in percent of the image's layers.
const maxWire = 1.0

// wire compares the length of an image's start stream, which has statements,
// config and compressed bootstrap, with the length of its layers.
func (b *bench) wire(ctx context.Context, data string, im layout) error {
	n, err := startBytes(ctx, data, imageName(im))
	if err != nil {
		return err
	}
	b.atMost(fmt.Sprintf("%s: metadata on the wire, %d bytes, ÷ layers", im.name(), n), 100*float64(n)/float64(im.size), maxWire, "%")
	return nil
}

// startBytes asks the owner of a data folder for an image as a worker does.
func startBytes(ctx context.Context, data, image string) (int64, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(data, "run", "quarry.sock"))
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	rq, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://quarry/v1/start/"+image, nil)
	if err != nil {
		return 0, err
	}
	res, err := client.Do(rq)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("GET %s: %s", rq.URL.Path, res.Status)
	}
	return io.Copy(io.Discard, res.Body)
}
