// Package access decides who may do what at a store node: it keeps tokens, finds
// the one that a request shows, and holds its scopes and repositories against
// what the request needs. One package does it for every listener, so that a route
// cannot have rules of its own.
package access

import (
	"fmt"
	"slices"
	"strings"

	"quarry/store/image"
)

// Scope is one thing that a token lets its holder do.
type Scope string

// The scopes. Any is no scope of a token: a request that needs it needs some valid
// token, whatever that may do.
const (
	Any   Scope = ""
	Pull  Scope = "pull"  // read names, images and chunks
	Push  Scope = "push"  // store images, move and delete names, add signatures
	Trace Scope = "trace" // send which chunks a run touched
	Run   Scope = "run"   // make sandboxes on a worker, use and end them
	Admin Scope = "admin" // everything, in every repository
)

// scopes lists those that a token can have, in the order in which they are kept.
var scopes = []Scope{Pull, Push, Trace, Run, Admin}

// ParseScopes reads a list with commas between, and returns it sorted.
func ParseScopes(text string) ([]Scope, error) {
	var out []Scope
	for word := range strings.SplitSeq(text, ",") {
		s := Scope(strings.TrimSpace(word))
		if !slices.Contains(scopes, s) {
			return nil, fmt.Errorf("scope %q: want one or more of pull, push, trace, run, admin with commas between", word)
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Scope) int { return slices.Index(scopes, a) - slices.Index(scopes, b) })
	return slices.Compact(out), nil
}

// ParseRepo reads a repository prefix, with or without a slash at its end.
func ParseRepo(text string) (string, error) {
	repo := strings.TrimSuffix(text, "/")
	return repo, image.ValidateRepo(repo)
}

// Covers reports whether prefix covers repo: it is the same, or the first of its
// components. team covers team/x, and not teamwork.
func Covers(prefix, repo string) bool {
	rest, ok := strings.CutPrefix(repo, prefix)
	return ok && (rest == "" || rest[0] == '/')
}
