package oci_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/converter/oci"
)

// withDockerConfig gives this test's user a docker config file and credential
// helpers, and nothing of the one who runs the test.
func withDockerConfig(t *testing.T, config string) {
	t.Helper()
	home, dir, bin := t.TempDir(), t.TempDir(), t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_RUNTIME_DIR", home)
	t.Setenv("XDG_CONFIG_HOME", home)
	t.Setenv("REGISTRY_AUTH_FILE", "")
	t.Setenv("DOCKER_CONFIG", dir)
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	if config != "" {
		write(t, filepath.Join(dir, "config.json"), []byte(config))
	}
	for name, answer := range map[string]string{
		"vault": `{"ServerURL":"x","Username":"vaulted","Secret":"from the vault"}`,
		"cloud": `{"ServerURL":"x","Username":"<token>","Secret":"an identity"}`,
	} {
		script := fmt.Sprintf("#!/bin/sh\ncat >/dev/null\necho '%s'\n", answer)
		if err := os.WriteFile(filepath.Join(bin, "docker-credential-"+name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCredentialsOfTheUserAreDockers(t *testing.T) {
	auth := base64.StdEncoding.EncodeToString([]byte("robot:pa:ss"))
	robot := oci.Credentials{Username: "robot", Password: "pa:ss"}
	tests := map[string]struct {
		config, src string
		want        oci.Credentials
	}{
		"no config file":         {"", "registry://127.0.0.1:5000/p/x", oci.Credentials{}},
		"auths":                  {`{"auths":{"127.0.0.1:5000":{"auth":"` + auth + `"}}}`, "registry://127.0.0.1:5000/p/x", robot},
		"another host":           {`{"auths":{"127.0.0.1:5000":{"auth":"` + auth + `"}}}`, "registry://127.0.0.1:5001/p/x", oci.Credentials{}},
		"Docker Hub's":           {`{"auths":{"https://index.docker.io/v1/":{"auth":"` + auth + `"}}}`, "registry://docker.io/library/debian", robot},
		"a helper for a host":    {`{"credHelpers":{"127.0.0.1:5000":"vault"}}`, "registry://127.0.0.1:5000/p/x", oci.Credentials{Username: "vaulted", Password: "from the vault"}},
		"a helper for all":       {`{"credsStore":"cloud"}`, "registry://127.0.0.1:5000/p/x", oci.Credentials{Username: "<token>", IdentityToken: "an identity"}},
		"a source without hosts": {`{"credsStore":"vault"}`, "oci:/x", oci.Credentials{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			withDockerConfig(t, tt.config)
			got, err := oci.UserCredentials(t.Context(), tt.src)
			if err != nil {
				t.Fatal(err)
			}
			if tt.want.IdentityToken != "" {
				got.Username = tt.want.Username // some versions of the helper protocol drop it
			}
			if got != tt.want {
				t.Errorf("credentials of %q: user %q, want %q", tt.src, got.Username, tt.want.Username)
			}
		})
	}
	withDockerConfig(t, "{")
	if _, err := oci.UserCredentials(t.Context(), "registry://127.0.0.1:5000/p/x"); err == nil || !strings.Contains(err.Error(), "credentials for 127.0.0.1:5000") {
		t.Errorf("a config file that is damaged: error %v", err)
	}
}

func TestSecretsDoNotShow(t *testing.T) {
	c := oci.Config{Credentials: oci.Credentials{Username: "u", Password: "hidden", IdentityToken: "hidden", RegistryToken: "hidden"}}
	j, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{string(j), fmt.Sprint(c), fmt.Sprintf("%+v", c), fmt.Sprintf("%#v", c), fmt.Sprintf("%q", c.Credentials.Password), c.Credentials.Password.LogValue().String()} {
		if strings.Contains(s, "hidden") || !strings.Contains(s, "[redacted]") {
			t.Errorf("it shows: %s", s)
		}
	}
}
