package oci_test

import (
	"context"
	"strings"
	"testing"

	"quarry/converter/oci"
)

// Whatever bytes a source is: where nothing is and no registry is asked, it fails
// with an error that names the scheme.
func FuzzSource(f *testing.F) {
	for _, s := range []string{
		"oci:x", "oci-archive:x:y", "docker-archive:x@sha256:00", "registry://h:1/r", "registry:////", "oci:", ":", "registry://[::1]/x@sha256:",
		"registry://u:p@h:1/r", "oci://u@h/r", "u:p@h/r",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		t.Chdir(t.TempDir())
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // a registry is not asked
		im, err := oci.Open(ctx, s, oci.Config{})
		if err == nil {
			im.Close()
			t.Fatalf("%q opens", s)
		}
		if oci.IsSource(s) && !strings.Contains(err.Error(), strings.SplitN(s, ":", 2)[0]) {
			t.Fatalf("error %q does not name %q", err, s)
		}
	})
}
