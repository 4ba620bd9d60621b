package s3

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"quarry/store/bucket"
)

const (
	// defaultRegion is what servers other than AWS are called by.
	defaultRegion = "us-east-1"
	// maxPrefix leaves 768 of the 1024 bytes of a key to quarry, which uses 600.
	maxPrefix = 256
	// maxName bounds a bucket's name, S3's own limit.
	maxName = 63
)

// Location names a bucket, or a part of one, and the server that has it.
type Location struct {
	Bucket   string
	Prefix   string // of all keys; without slashes at its ends
	Endpoint string // http[s]://HOST[:PORT]; empty: AWS
	Region   string // empty: AWS_REGION, or what the SDK's files say
}

// ParseURL reads s3://BUCKET[/PREFIX][?endpoint=URL][&region=NAME].
func ParseURL(text string) (Location, error) {
	u, err := url.Parse(text)
	if err != nil {
		return Location{}, errors.New("it is not a URL") // what url says of it may show a password
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil || u.Scheme != "s3" || u.User != nil || u.Fragment != "" || u.Opaque != "" {
		return Location{}, fmt.Errorf("want s3://BUCKET[/PREFIX][?endpoint=https://HOST&region=NAME]; credentials come from the environment or AWS's files")
	}
	loc := Location{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Endpoint: strings.TrimSuffix(query.Get("endpoint"), "/"), Region: query.Get("region")}
	for name, values := range query {
		if name != "endpoint" && name != "region" || len(values) != 1 {
			return Location{}, fmt.Errorf("parameter %q: want endpoint and region, each once", name)
		}
	}
	if !validName(loc.Bucket) {
		return Location{}, fmt.Errorf("bucket name %q: want 3 to %d of a-z, 0-9, dots and dashes", loc.Bucket, maxName)
	}
	if loc.Prefix != "" {
		if err := bucket.ValidKey("x/" + loc.Prefix); err != nil || len(loc.Prefix) > maxPrefix {
			return Location{}, fmt.Errorf("prefix %q: want a path of [A-Za-z0-9._+@:=-] of at most %d bytes", loc.Prefix, maxPrefix)
		}
	}
	if loc.Endpoint != "" {
		if err := validEndpoint(loc.Endpoint); err != nil {
			return Location{}, err
		}
	}
	return loc, nil
}

func validName(name string) bool {
	bad := func(r rune) bool { return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '.' || r == '-') }
	return len(name) >= 3 && len(name) <= maxName && !strings.ContainsFunc(name, bad)
}

func validEndpoint(text string) error {
	e, err := url.Parse(text)
	if err != nil || e.Scheme != "http" && e.Scheme != "https" || e.Host == "" || e.Path != "" || e.User != nil || e.RawQuery != "" || e.Fragment != "" {
		return errors.New("endpoint: want http://HOST[:PORT] or https://HOST[:PORT], nothing else")
	}
	return nil
}

// String returns the URL, always the same for one location. It has no secrets.
func (l Location) String() string {
	u := url.URL{Scheme: "s3", Host: l.Bucket}
	if l.Prefix != "" {
		u.Path = "/" + l.Prefix
	}
	query := url.Values{}
	if l.Endpoint != "" {
		query.Set("endpoint", l.Endpoint)
	}
	if l.Region != "" {
		query.Set("region", l.Region)
	}
	u.RawQuery = query.Encode() // sorted
	return u.String()
}

func (l Location) prefix() string {
	if l.Prefix == "" {
		return ""
	}
	return l.Prefix + "/"
}
