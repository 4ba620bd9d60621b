package e2e_test

import (
	"os"
	"os/exec"
	"regexp"
	"testing"

	"quarry/internal/need"
)

// optionalMounts are the checks that end as skipped: a mount that names no
// repository, which the specification leaves to the registry, once an algorithm.
const optionalMounts = "2"

// TestConformance runs the distribution specification's own program against a
// server, with everything on that the next version of the specification has too.
func TestConformance(t *testing.T) {
	prog := need.Tool(t, "conformance")
	l := newLab(t)
	s, err := l.Serve(t.Context(), l.Path("d"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Stop() })
	cmd := exec.CommandContext(t.Context(), prog)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "OCI_REGISTRY="+s.Addr(), "OCI_TLS=disabled", "OCI_VERSION=dev", "OCI_RESULTS_DIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("conformance: %v", err)
	}
	summary := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^  (Disabled|Skip|Pass|FAIL|Error|Total)\.*: +([0-9]+)$`).FindAllSubmatch(out, -1) {
		summary[string(m[1])] = string(m[2])
	}
	t.Logf("conformance: %s checks, %s passed, %s failed, %s errors, %s skipped", summary["Total"], summary["Pass"], summary["FAIL"], summary["Error"], summary["Skip"])
	if summary["FAIL"] != "0" || summary["Error"] != "0" || summary["Disabled"] != "0" || summary["Skip"] != optionalMounts || summary["Pass"] == "" {
		t.Errorf("%s", out)
	}
}
