package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/internal/need"
)

func TestDoctorTellsRunscByItsModule(t *testing.T) {
	need.Tool(t, "runsc") // as go install makes it, which itself says VERSION_MISSING
	if got, err := lookRunsc(t.Context()); err != nil || !strings.HasSuffix(got, ", version "+runscVersion()) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestDoctorTellsAnotherRunsc(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if err := os.WriteFile(filepath.Join(dir, "runsc"), []byte("#!/bin/sh\necho runsc version release-1.0\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := lookRunsc(t.Context()); err == nil || !strings.Contains(err.Error(), "release-1.0") {
		t.Errorf("%q, %v", got, err)
	}
}
