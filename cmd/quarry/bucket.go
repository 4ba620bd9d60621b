package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"

	"quarry/internal/durable"
	"quarry/internal/strictjson"
	"quarry/store/bucket"
	"quarry/store/bucket/dir"
	"quarry/worker/folder"
)

// storage is where a store's objects and journal are.
type storage interface {
	bucket.Bucket
	bucket.Journal
	io.Closer
}

// bucketURL says where the bucket of a data folder is, in one spelling a place;
// empty for the folder bucket in the data folder itself.
type bucketURL string

const bucketHelp = "where objects and journal are: file:///FOLDER; default is the folder bucket in DIR. DIR remembers it, in bucket.json"

// parseBucketURL reads --bucket.
func parseBucketURL(text string) (bucketURL, error) {
	if text == "" {
		return "", nil
	}
	u, err := url.Parse(text)
	if err != nil {
		return "", fmt.Errorf("%w: --bucket: it is not a URL", errUsage) // what url says of it may show a password
	}
	switch {
	case u.Scheme != "file":
		return "", fmt.Errorf("%w: --bucket: want file:///FOLDER, not %s", errUsage, u.Redacted())
	case u.Host != "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || !filepath.IsAbs(u.Path):
		return "", fmt.Errorf("%w: --bucket %s: want file:// and the absolute path of a folder, nothing else", errUsage, u.Redacted())
	}
	return bucketURL((&url.URL{Scheme: "file", Path: filepath.Clean(u.Path)}).String()), nil
}

// folder returns the folder the bucket is in.
func (u bucketURL) folder(d dataDir) string {
	if u == "" {
		return d.bucket()
	}
	parsed, err := url.Parse(string(u))
	if err != nil {
		panic("a bucket URL that was not parsed: " + err.Error())
	}
	return parsed.Path
}

// show names the place for messages.
func (u bucketURL) show(d dataDir) string {
	if u == "" {
		return d.bucket()
	}
	return string(u)
}

// place names an object of the bucket for messages.
func (u bucketURL) place(d dataDir, key string) string {
	return filepath.Join(u.folder(d), key)
}

const bucketFileVersion = 1

// bucketFile is DIR/bucket.json. A data folder without it has its own bucket.
type bucketFile struct {
	Version int    `json:"version"`
	URL     string `json:"url"`
}

// remembered returns where the folder's bucket is; false when no store was ever
// made in the folder.
func (d dataDir) remembered() (bucketURL, bool, error) {
	raw, err := folder.ReadBounded(d.bucketFile(), maxOwnFile)
	if errors.Is(err, fs.ErrNotExist) {
		for _, path := range []string{d.bucket(), d.index()} {
			if _, err := os.Stat(path); err == nil {
				return "", true, nil
			} else if !errors.Is(err, fs.ErrNotExist) {
				return "", false, d.wrap(err)
			}
		}
		return "", false, nil
	}
	if err != nil {
		return "", false, d.wrap(err)
	}
	f, err := strictjson.Decode[bucketFile](raw, maxOwnFile)
	var u bucketURL
	switch {
	case err != nil:
	case f.Version != bucketFileVersion:
		return "", false, fmt.Errorf("%s has version %d, this program knows %d: use the quarry that wrote it", d.bucketFile(), f.Version, bucketFileVersion)
	case f.URL == "":
		err = errors.New("it names no URL")
	default:
		u, err = parseBucketURL(f.URL)
	}
	if err != nil {
		return "", false, fmt.Errorf("%w: %s: %w: remove it and run quarry serve once with --data and the --bucket it had", errDamage, d.bucketFile(), err)
	}
	return u, true, nil
}

// chooseBucket returns where the folder's bucket is, given what --bucket says, and
// has the folder remember it. The file comes before the store: a store that no
// later command finds would be begun a second time, beside the first.
func (d dataDir) chooseBucket(asked bucketURL) (bucketURL, error) {
	has, made, err := d.remembered()
	switch {
	case err != nil:
		return "", err
	case made && (asked == "" || asked == has):
		return has, nil
	case made && has == "":
		return "", fmt.Errorf("--bucket %s: data folder %s has its bucket in %s: leave --bucket out, or use another --data", asked, d, d.bucket())
	case made:
		return "", fmt.Errorf("--bucket %s: the bucket of data folder %s is %s: leave --bucket out, or use another --data; if the bucket itself moved, remove %s first",
			asked, d, has, d.bucketFile())
	case asked == "":
		return "", nil
	}
	b, err := json.Marshal(bucketFile{Version: bucketFileVersion, URL: string(asked)})
	if err != nil {
		return "", err
	}
	return asked, d.wrap(durable.WriteFile(d.bucketFile(), b, 0o600))
}

// openBucket opens the bucket of a data folder.
func (d dataDir) openBucket(_ context.Context, u bucketURL) (storage, error) {
	if err := d.checkBucket(u.folder(d)); err != nil {
		return nil, err
	}
	b, err := dir.Open(u.folder(d))
	if err != nil {
		return nil, err // not b, which would be a storage that is not nil
	}
	return b, nil
}

// checkBucket refuses a data folder with an index and nothing in its bucket, whose
// file system is not mounted, say. A new store begun there would count its names
// from 1 again, and be hidden when the right one is back.
func (d dataDir) checkBucket(path string) error {
	if _, err := os.Stat(d.index()); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return d.wrap(err)
	}
	for _, e := range entries {
		if e.Name() != durable.TmpDir && e.Name() != "lost+found" {
			return nil
		}
	}
	return fmt.Errorf("%w: %s is empty, but was not when %s was made: mount it or put it back, or remove the index to begin a new store",
		errDamage, path, d.index())
}
