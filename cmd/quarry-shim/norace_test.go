//go:build !race

package main_test

// buildFlags are those of the shim under test.
var buildFlags []string
