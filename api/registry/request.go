package registry

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"

	"quarry/api/access"
	"quarry/store/image"
	"quarry/store/registry"
)

const (
	// maxPath bounds a path: a repository of 255 bytes, a digest of 135, and the
	// words between them, even with every byte escaped.
	maxPath = 2048
	// maxQuery bounds a query: the tags of one push are the longest.
	maxQuery = 4096
	// maxTags bounds the names that one push by digest moves.
	maxTags = 16
	// maxUploadID bounds the id of an upload, which has 26 letters and digits.
	maxUploadID = 64
)

// op is what a request asks for.
type op int

const (
	opNone op = iota
	opPing
	opBlob
	opBlobDelete
	opUploadStart
	opUploadOffset
	opUploadAppend
	opUploadFinish
	opUploadCancel
	opManifest
	opManifestPut
	opManifestDelete
	opTags
	opReferrers
	opCatalog
)

// request is a parsed request line. Which fields are set depends on op.
type request struct {
	op     op
	head   bool // only the headers are wanted
	repo   string
	tag    string        // of a manifest that is named by tag
	digest digest.Digest // of a blob, a manifest, or a subject
	id     string        // of an upload

	mount, from  string // of a blob that another repository has
	tags         []string
	artifactType string
	last         string // list what comes after it
	n            int    // entries of a page
}

// needs says what a request must be allowed in its repository.
func (r request) needs() access.Scope {
	switch r.op {
	case opPing:
		return access.Any
	case opBlob, opManifest, opTags, opReferrers, opCatalog:
		return access.Pull
	}
	return access.Push
}

// methods are the operations on one kind of path.
type methods map[string]op

var (
	pingMethods     = methods{"GET": opPing, "HEAD": opPing}
	blobMethods     = methods{"GET": opBlob, "HEAD": opBlob, "DELETE": opBlobDelete}
	startMethods    = methods{"POST": opUploadStart}
	uploadMethods   = methods{"GET": opUploadOffset, "PATCH": opUploadAppend, "PUT": opUploadFinish, "DELETE": opUploadCancel}
	manifestMethods = methods{"GET": opManifest, "HEAD": opManifest, "PUT": opManifestPut, "DELETE": opManifestDelete}
	tagsMethods     = methods{"GET": opTags, "HEAD": opTags}
	referrerMethods = methods{"GET": opReferrers, "HEAD": opReferrers}
	catalogMethods  = methods{"GET": opCatalog, "HEAD": opCatalog}
)

// parse reads a request line. path is the path as sent, still escaped. It is a pure
// function, so that what a hostile request line can do is decided, tested and fuzzed
// here alone.
func parse(method, path, query string) (request, error) {
	elems, err := split(path)
	if err != nil {
		return request{}, err
	}
	r := request{n: registry.MaxPage}
	allowed, err := r.setPath(elems)
	if err != nil {
		return request{}, err
	}
	var ok bool
	if r.op, ok = allowed[method]; !ok {
		return request{}, fmt.Errorf("%w: %.16q on %s", errMethod, method, path)
	}
	r.head = method == http.MethodHead
	if err := r.setQuery(query); err != nil {
		return request{}, err
	}
	return r, nil
}

// split returns the elements of a path after /v2/. It refuses every spelling that a
// proxy or a file system might read differently: escapes that no valid name needs,
// empty and dot elements. A slash at the end is taken.
func split(path string) ([]string, error) {
	rest, ok := strings.CutPrefix(path, "/v2")
	if len(path) > maxPath || !ok {
		return nil, fmt.Errorf("%w: path of %d bytes", errNoRoute, len(path))
	}
	rest = strings.ReplaceAll(strings.ReplaceAll(rest, "%3A", ":"), "%3a", ":") // a digest's colon, which some clients escape
	if strings.Contains(rest, "%") {
		return nil, fmt.Errorf("%w: path %q has escapes", registry.ErrNameInvalid, path)
	}
	rest = strings.TrimSuffix(strings.TrimPrefix(rest, "/"), "/")
	if rest == "" {
		return nil, nil
	}
	elems := strings.Split(rest, "/")
	for _, e := range elems {
		if e == "" || e == "." || e == ".." {
			return nil, fmt.Errorf("%w: path %q has an empty or dot element", registry.ErrNameInvalid, path)
		}
	}
	return elems, nil
}

// setPath reads the elements of a path from its end, because a repository's name may
// have any of the words in it.
func (r *request) setPath(elems []string) (methods, error) {
	n := len(elems)
	at := func(i int) string { // from the end, the last is 1
		if i > n {
			return ""
		}
		return elems[n-i]
	}
	switch {
	case n == 0:
		return pingMethods, nil
	case n == 1 && at(1) == "_catalog":
		return catalogMethods, nil
	case at(2) == "blobs" && at(1) == "uploads":
		return startMethods, r.setRepo(elems[:n-2])
	case at(3) == "blobs" && at(2) == "uploads":
		if len(at(1)) > maxUploadID {
			return nil, fmt.Errorf("%w: its id has %d bytes", registry.ErrUploadUnknown, len(at(1)))
		}
		r.id = at(1)
		return uploadMethods, r.setRepo(elems[:n-3])
	case at(2) == "blobs":
		return blobMethods, r.setDigest(elems[:n-2], at(1))
	case at(2) == "referrers":
		return referrerMethods, r.setDigest(elems[:n-2], at(1))
	case at(2) == "tags" && at(1) == "list":
		return tagsMethods, r.setRepo(elems[:n-2])
	case at(2) == "manifests" && strings.Contains(at(1), ":"):
		return manifestMethods, r.setDigest(elems[:n-2], at(1))
	case at(2) == "manifests":
		r.tag = at(1)
		if err := image.ValidateTag(r.tag); err != nil {
			return nil, fmt.Errorf("%w: %w", errTagInvalid, err)
		}
		return manifestMethods, r.setRepo(elems[:n-2])
	}
	return nil, fmt.Errorf("%w: /v2/%s", errNoRoute, strings.Join(elems, "/"))
}

func (r *request) setRepo(elems []string) error {
	r.repo = strings.Join(elems, "/")
	if err := image.ValidateRepo(r.repo); err != nil {
		return fmt.Errorf("%w: %w", registry.ErrNameInvalid, err)
	}
	return nil
}

func (r *request) setDigest(repo []string, s string) (err error) {
	if err := r.setRepo(repo); err != nil {
		return err
	}
	r.digest, err = registry.ParseDigest(s)
	return err
}

// setQuery reads the parameters that mean something to the operation. Others are
// nobody's business here: clients send some to every registry.
func (r *request) setQuery(query string) error {
	if len(query) > maxQuery {
		return fmt.Errorf("%w: of %d bytes, at most %d are allowed", errQuery, len(query), maxQuery)
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return fmt.Errorf("%w: %w", errQuery, err)
	}
	switch r.op {
	case opUploadStart, opUploadFinish:
		return r.setUpload(values)
	case opManifestPut:
		return r.setTags(values["tag"])
	case opTags, opCatalog:
		if err := once(values, "n", "last"); err != nil {
			return err
		}
		r.last = values.Get("last")
		return r.setN(values.Get("n"))
	case opReferrers:
		if err := once(values, "artifactType", "last"); err != nil {
			return err
		}
		r.artifactType, r.last = values.Get("artifactType"), values.Get("last")
	}
	return nil
}

// once refuses parameters that are given twice, which readers take differently.
func once(values url.Values, names ...string) error {
	for _, name := range names {
		if len(values[name]) > 1 {
			return fmt.Errorf("%w: %s is given %d times", errQuery, name, len(values[name]))
		}
	}
	return nil
}

func (r *request) setUpload(values url.Values) error {
	if err := once(values, "digest", "mount", "from"); err != nil {
		return err
	}
	for _, name := range []string{"digest", "mount"} {
		s := values.Get(name)
		if s == "" {
			continue
		}
		d, err := registry.ParseDigest(s)
		if err != nil {
			return err
		}
		if name == "digest" {
			r.digest = d
		} else if r.op == opUploadStart {
			r.mount = s
		}
	}
	if r.op == opUploadFinish && r.digest == "" {
		return fmt.Errorf("%w: the upload is finished with ?digest=", registry.ErrDigestInvalid)
	}
	if r.from = values.Get("from"); r.mount == "" || r.from == "" {
		r.from = ""
		return nil
	}
	if err := image.ValidateRepo(r.from); err != nil {
		return fmt.Errorf("%w: from: %w", registry.ErrNameInvalid, err)
	}
	return nil
}

// setTags reads the tags that a push names beside its digest or its own tag.
func (r *request) setTags(more []string) error {
	if len(more) > maxTags {
		return fmt.Errorf("%w: %d tags, at most %d are moved at once", errQuery, len(more), maxTags)
	}
	r.tags = slices.Clone(more)
	if r.tag != "" {
		r.tags = append(r.tags, r.tag)
	}
	for _, tag := range r.tags {
		if err := image.ValidateTag(tag); err != nil {
			return fmt.Errorf("%w: %w", errTagInvalid, err)
		}
	}
	slices.Sort(r.tags)
	r.tags = slices.Compact(r.tags)
	return nil
}

func (r *request) setN(s string) error {
	if s == "" {
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return fmt.Errorf("%w: n is %.32q, want a number", errQuery, s)
	}
	r.n = min(n, registry.MaxPage)
	return nil
}
