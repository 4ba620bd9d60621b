package reader

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"quarry/store/chunk"
	"quarry/worker/folder"
)

// controlClient asks the reader's control socket.
func controlClient(d folder.Dir) *http.Client {
	return &http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var nd net.Dialer
				return nd.DialContext(ctx, "unix", d.ReaderControl())
			},
		},
	}
}

// ErrNotOpen says that the reader does not have the image open.
var ErrNotOpen = errors.New("the reader does not have the image open")

// ImageStats asks the reader what an image has cost since it was opened. Errors:
// ErrNotOpen, and those of a reader that does not answer.
func ImageStats(ctx context.Context, d folder.Dir, id chunk.Digest) (Stats, error) {
	var st Stats
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://reader/images/"+id.Hex()+"/stats", nil)
	if err != nil {
		return st, err
	}
	resp, err := controlClient(d).Do(req)
	if err != nil {
		return st, fmt.Errorf("ask the reader: %w", err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
		err = json.NewDecoder(resp.Body).Decode(&st)
		return st, err
	case http.StatusNotFound:
		return st, ErrNotOpen
	}
	return st, fmt.Errorf("ask the reader: %s", resp.Status)
}

// Ping reports whether a reader answers; an idle one stays for another while.
func Ping(ctx context.Context, d folder.Dir) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://reader/ping", nil)
	if err != nil {
		return false
	}
	resp, err := controlClient(d).Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusNoContent
}
