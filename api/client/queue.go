package client

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"quarry/api"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

// maxJobPages bounds a list of jobs: as many as a queue holds by default.
const maxJobPages = 220

// Jobs returns the jobs that the filter takes, the newest first, all of them unless
// it has a limit.
func (c *Client) Jobs(ctx context.Context, f jobs.Filter) ([]api.Job, error) {
	query := url.Values{}
	set := func(name, value string) {
		if value != "" {
			query.Set(name, value)
		}
	}
	set("state", string(f.State))
	set("repo", f.Repo)
	if !f.Source.IsZero() {
		set("source", f.Source.String())
	}
	set("after", f.After)
	var all []api.Job
	for range maxJobPages {
		var page api.JobsPage
		if err := c.getJSON(ctx, request{method: http.MethodGet, path: "/v1/jobs?" + query.Encode()}, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Jobs...)
		if f.Limit > 0 && len(all) >= f.Limit {
			return all[:f.Limit], nil
		}
		if page.Next == "" {
			return all, nil
		}
		query.Set("after", page.Next)
	}
	return nil, fmt.Errorf("list jobs: more than %d pages", maxJobPages)
}

// JobsOf returns the jobs of a source, of all platforms.
func (c *Client) JobsOf(ctx context.Context, source chunk.Digest) ([]api.Job, error) {
	return c.Jobs(ctx, jobs.Filter{Source: source})
}

// Job returns the job of that id.
func (c *Client) Job(ctx context.Context, id string) (api.Job, error) {
	var j api.Job
	err := c.getJSON(ctx, request{method: http.MethodGet, path: "/v1/jobs/" + url.PathEscape(id)}, &j)
	return j, err
}

// followRetries is how often in a row a stream of events is opened anew without an
// event: over a minute, in which a store starts again.
const followRetries = 60

// FollowJob calls each for what changes of a job until it has ended, and returns it
// as it is then. A stream that breaks off is opened again.
func (c *Client) FollowJob(ctx context.Context, id string, each func(api.Job)) (api.Job, error) {
	rq := request{method: http.MethodGet, path: "/v1/jobs/" + url.PathEscape(id) + "/events", job: true}
	for failed := 0; ; {
		var last api.Job
		err := c.call(ctx, rq, func(resp *http.Response) error {
			return readJobs(resp.Body, func(j api.Job) bool {
				last, failed = j, 0
				each(j)
				return j.State.Active()
			})
		})
		if err == nil && last.State != "" && !last.State.Active() {
			return last, nil
		}
		// The server ended, or was killed: the next one knows the job.
		var known *api.Error
		if failed++; failed > followRetries || errors.As(err, &known) && !known.Retryable {
			return last, cmp.Or(err, io.ErrUnexpectedEOF)
		}
		if err := c.pause(ctx, failed, cmp.Or(err, io.ErrUnexpectedEOF)); err != nil {
			return last, err
		}
	}
}

// readJobs reads server-sent events until more is false or they end.
func readJobs(r io.Reader, each func(api.Job) (more bool)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, api.MaxEvent)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var j api.Job
		if err := json.Unmarshal([]byte(data), &j); err != nil {
			return fmt.Errorf("decode event: %w", err)
		}
		if !each(j) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	return nil
}
