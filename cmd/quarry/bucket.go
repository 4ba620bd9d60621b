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
	"syscall"

	"quarry/internal/durable"
	"quarry/internal/strictjson"
	"quarry/store/bucket"
	"quarry/store/bucket/dir"
	"quarry/store/bucket/s3"
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

const bucketHelp = "where objects and journal are: s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME] with AWS's credentials of this process, or file:///FOLDER; default is the folder bucket in DIR. DIR remembers it, in bucket.json"

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
	case u.Scheme == "s3":
		loc, err := s3.ParseURL(text)
		if err != nil {
			return "", fmt.Errorf("%w: --bucket: %w", errUsage, err)
		}
		return bucketURL(loc.String()), nil
	case u.Scheme != "file":
		return "", fmt.Errorf("%w: --bucket: want s3://BUCKET or file:///FOLDER, not %s", errUsage, u.Redacted())
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

// remote returns the S3 bucket that it is, or false for a folder.
func (u bucketURL) remote() (s3.Location, bool) {
	loc, err := s3.ParseURL(string(u))
	return loc, err == nil
}

// object names an object of the bucket for messages.
func (u bucketURL) object(d dataDir, key string) string {
	if _, ok := u.remote(); ok {
		return key + " in " + string(u)
	}
	return filepath.Join(u.folder(d), key)
}

const bucketFileVersion = 1

// bucketFile is DIR/bucket.json. A data folder without it has its own bucket.
type bucketFile struct {
	Version int    `json:"version"`
	URL     string `json:"url"`
	// UnsafeSingleWriter is what --unsafe-single-writer said: the servers that
	// commands start need it too.
	UnsafeSingleWriter bool `json:"unsafe_single_writer,omitempty"`
}

// place is a bucket, and how to open it.
type place struct {
	url    bucketURL
	unsafe bool // --unsafe-single-writer
}

// remembered returns where the folder's bucket is; false when no store was ever
// made in the folder.
func (d dataDir) remembered() (place, bool, error) {
	raw, err := folder.ReadBounded(d.bucketFile(), maxOwnFile)
	if errors.Is(err, fs.ErrNotExist) {
		for _, path := range []string{d.bucket(), d.index()} {
			if _, err := os.Stat(path); err == nil {
				return place{}, true, nil
			} else if !errors.Is(err, fs.ErrNotExist) {
				return place{}, false, d.wrap(err)
			}
		}
		return place{}, false, nil
	}
	if err != nil {
		return place{}, false, d.wrap(err)
	}
	f, err := strictjson.Decode[bucketFile](raw, maxOwnFile)
	var u bucketURL
	switch {
	case err != nil:
	case f.Version != bucketFileVersion:
		return place{}, false, fmt.Errorf("%s has version %d, this program knows %d: use the quarry that wrote it", d.bucketFile(), f.Version, bucketFileVersion)
	case f.URL == "":
		err = errors.New("it names no URL")
	default:
		u, err = parseBucketURL(f.URL)
	}
	if err != nil {
		return place{}, false, fmt.Errorf("%w: %s: %w: remove it and run quarry serve once with --data and the --bucket it had", errDamage, d.bucketFile(), err)
	}
	return place{u, f.UnsafeSingleWriter}, true, nil
}

// chooseBucket returns where the folder's bucket is, given what --bucket says, and
// whether the folder has to remember that.
func (d dataDir) chooseBucket(asked place) (chosen place, news bool, err error) {
	has, made, err := d.remembered()
	switch {
	case err != nil:
		return place{}, false, err
	case made && asked.url != "" && asked.url != has.url && has.url == "":
		return place{}, false, fmt.Errorf("--bucket %s: data folder %s has its bucket in %s: leave --bucket out, or use another --data", asked.url, d, d.bucket())
	case made && asked.url != "" && asked.url != has.url:
		return place{}, false, fmt.Errorf("--bucket %s: the bucket of data folder %s is %s: leave --bucket out, or use another --data; if the bucket itself moved, remove %s first",
			asked.url, d, has.url, d.bucketFile())
	}
	chosen = place{url: asked.url, unsafe: asked.unsafe || has.unsafe}
	if made {
		chosen.url = has.url
	}
	return chosen, chosen.url != "" && (!made || chosen != has), nil
}

// remember has the folder remember where its bucket is. That comes after the bucket was
// opened, as a URL that was mistyped would be in the way of the right one, and before there
// is a store in it: one that no later command finds would be begun a second time, beside
// the first.
func (d dataDir) remember(p place) error {
	b, err := json.Marshal(bucketFile{Version: bucketFileVersion, URL: string(p.url), UnsafeSingleWriter: p.unsafe})
	if err != nil {
		return err
	}
	return d.wrap(durable.WriteFile(d.bucketFile(), b, 0o600))
}

// openBucket opens the bucket of a data folder, beside a process that may be its
// writer. A node that only reads keeps the leases of its workers there, where it can.
func (d dataDir) openBucket(ctx context.Context, p place, readOnly bool) (storage, error) {
	if loc, ok := p.url.remote(); ok {
		return d.openRemote(ctx, loc, p.unsafe, readOnly)
	}
	path := p.url.folder(d)
	if err := d.checkBucket(path); err != nil {
		return nil, err
	}
	if _, err := os.Stat(path); readOnly && err != nil {
		return nil, fmt.Errorf("open bucket: %w", err) // nobody reads what is about to be made
	}
	b, err := dir.OpenShared(path)
	if readOnly && (errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrPermission)) {
		b, err = dir.OpenReadOnly(path)
	}
	if err != nil {
		return nil, err // not b, which would be a storage that is not nil
	}
	return b, nil
}

// openRemote opens an S3 bucket. One that has nothing beside an index is not the
// one the index was made of, or somebody emptied it.
func (d dataDir) openRemote(ctx context.Context, loc s3.Location, unsafe, readOnly bool) (_ storage, err error) {
	b, err := s3.Open(ctx, s3.Config{Location: loc, UnsafeSingleWriter: unsafe})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	if !readOnly { // the probe writes
		if err := b.Probe(ctx); err != nil {
			return nil, err
		}
	}
	if _, err := os.Stat(d.index()); errors.Is(err, fs.ErrNotExist) {
		return b, nil
	}
	for _, err := range b.List(ctx, "") {
		if err != nil {
			return nil, err
		}
		return b, nil
	}
	return nil, fmt.Errorf("%w: %s is empty, but was not when %s was made: put it back, or remove the index to begin a new store",
		errDamage, loc, d.index())
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
