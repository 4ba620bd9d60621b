package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"testing"

	"quarry/store/bucket/s3/s3test"
)

// Only a remote bucket has a range cache, and only where a person serves it.
func TestWhichBucketsHaveARangeCache(t *testing.T) {
	server := s3test.New(t)
	remote := func() place {
		return place{url: bucketURL(fmt.Sprintf("s3://%s?endpoint=%s", server.Bucket(t), url.QueryEscape(server.URL)))}
	}
	for _, c := range []struct {
		name  string
		cfg   ownerConfig
		has   bool
		usage bool
	}{
		{"S3", ownerConfig{bucket: remote()}, true, false},
		{"S3, a size", ownerConfig{bucket: remote(), cache: cacheSize{"64M"}}, true, false},
		{"S3, none", ownerConfig{bucket: remote(), cache: cacheSize{"none"}}, false, false},
		{"S3, in the background", ownerConfig{bucket: remote(), background: true}, false, false},
		{"S3, no size", ownerConfig{bucket: remote(), cache: cacheSize{"1K"}}, false, true},
		{"a folder", ownerConfig{}, false, false},
		{"a folder, none", ownerConfig{cache: cacheSize{"none"}}, false, false},
		{"a folder, a size", ownerConfig{cache: cacheSize{"64M"}}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.dir, c.cfg.log = dataDir(t.TempDir()), warnings(os.Stderr)
			o, err := openOwner(t.Context(), c.cfg)
			if errors.Is(err, errUsage) != c.usage {
				t.Fatalf("got error %v, a usage error is wanted: %t", err, c.usage)
			}
			if err != nil {
				return
			}
			defer o.close()
			if _, err := os.Stat(c.cfg.dir.cache()); (o.ranges != nil) != c.has || (err == nil) != c.has {
				t.Errorf("it has a cache: %t, its folder: %v; want %t", o.ranges != nil, err, c.has)
			}
		})
	}
}
