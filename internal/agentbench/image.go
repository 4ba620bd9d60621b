package agentbench

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

const (
	imageName = "bench/agents"
	agentPath = "/quarry-guest"
)

// makeImage converts an image that has quarry-guest, the agent, and nothing else.
func (r *run) makeImage(ctx context.Context) error {
	program, err := os.ReadFile(filepath.Join(filepath.Dir(r.Quarry), "quarry-guest"))
	if err != nil {
		return err
	}
	layout := r.path("image")
	if err := writeLayout(layout, program); err != nil {
		return fmt.Errorf("make the image of the agents: %w", err)
	}
	cmd := exec.CommandContext(ctx, r.Quarry, "convert", "oci:"+layout, "--data", r.path("data"), "--name", imageName)
	cmd.Env = environment(os.Environ())
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("convert the image of the agents: %w: %s", err, out)
	}
	return nil
}

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int    `json:"size"`
}

// writeLayout writes an OCI layout of one layer.
func writeLayout(dir string, program []byte) error {
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		return err
	}
	const oci = "application/vnd.oci.image."
	put := func(kind string, b []byte) (descriptor, error) {
		sum := fmt.Sprintf("%x", sha256.Sum256(b))
		return descriptor{oci + kind, "sha256:" + sum, len(b)}, os.WriteFile(filepath.Join(blobs, sum), b, 0o644)
	}
	putJSON := func(kind string, v any) (descriptor, error) {
		b, err := json.Marshal(v)
		if err != nil {
			return descriptor{}, err
		}
		return put(kind, b)
	}
	content, err := layerOf(program)
	if err != nil {
		return err
	}
	layer, err := put("layer.v1.tar", content)
	if err != nil {
		return err
	}
	config, err := putJSON("config.v1+json", map[string]any{
		"os": "linux", "architecture": runtime.GOARCH, "config": map[string]any{"Entrypoint": []string{agentPath}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layer.Digest}},
	})
	if err != nil {
		return err
	}
	manifest, err := putJSON("manifest.v1+json", map[string]any{
		"schemaVersion": 2, "mediaType": oci + "manifest.v1+json", "config": config, "layers": []descriptor{layer},
	})
	if err != nil {
		return err
	}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": oci + "index.v1+json", "manifests": []descriptor{manifest}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

// layerOf has the program, and places for what a worker mounts.
func layerOf(program []byte) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, d := range []string{"dev/", "etc/", "proc/", "sys/", "tmp/"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}); err != nil {
			return nil, err
		}
	}
	for _, f := range []struct {
		name    string
		content []byte
	}{{agentPath[1:], program}, {"etc/hostname", nil}, {"etc/hosts", nil}, {"etc/resolv.conf", nil}} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o755, Size: int64(len(f.content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}
