//go:build race

package main_test

// buildFlags are those of the shim under test: it is watched for races too, and
// one ends it, and its story with it.
var buildFlags = []string{"-race"}
