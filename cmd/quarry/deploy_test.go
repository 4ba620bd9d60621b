package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// parses holds a command line against the commands and flags that there are.
func parses(t *testing.T, where string, args []string) {
	t.Helper()
	c, rest, err := newRoot().Find(args)
	if err != nil || c.Name() == "quarry" {
		t.Errorf("%s: %q is no command: %v", where, args, err)
		return
	}
	if err := c.ParseFlags(rest); err != nil {
		t.Errorf("%s: %q: %v", where, args, err)
	}
}

// Nobody runs what deploy has in a test, so its command lines are read here.
func TestWhatIsDeployedHasCommandsThatThereAre(t *testing.T) {
	var compose struct {
		Services map[string]struct {
			Image       string
			Build       string
			Command     []string
			Environment map[string]string
			DependsOn   []string `yaml:"depends_on"`
			Volumes     []string
		}
		Volumes map[string]any
	}
	raw, err := os.ReadFile("../../deploy/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(raw, &compose); err != nil {
		t.Fatal(err)
	}
	node := compose.Services["node"]
	parses(t, "compose.yaml", node.Command)
	if _, err := os.Stat(filepath.Join("../../deploy", node.Build, "Dockerfile")); err != nil || node.Build == "" {
		t.Errorf("it is built from %q: %v", node.Build, err)
	}
	for name, s := range compose.Services {
		for _, other := range s.DependsOn {
			if _, ok := compose.Services[other]; !ok {
				t.Errorf("service %s depends on %s, which is none", name, other)
			}
		}
		for _, v := range s.Volumes {
			volume, _, _ := strings.Cut(v, ":")
			if _, ok := compose.Volumes[volume]; !ok {
				t.Errorf("service %s has volume %s, which is none", name, volume)
			}
		}
	}
	// docker compose … run --rm node token create …
	for _, line := range regexp.MustCompile(`(?m)run --rm node (.*)$`).FindAllStringSubmatch(string(raw), -1) {
		parses(t, "compose.yaml", strings.Fields(line[1]))
	}
	docker, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range regexp.MustCompile(`(?m)^CMD (.*)$`).FindAllStringSubmatch(string(docker), -1) {
		var args []string
		if err := yaml.Unmarshal([]byte(line[1]), &args); err != nil {
			t.Fatal(err)
		}
		parses(t, "Dockerfile", args)
	}
	units, err := filepath.Glob("../../deploy/*.service")
	if err != nil || len(units) == 0 {
		t.Fatal("no units", err)
	}
	for _, unit := range units {
		raw, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		// Also the commands that its comments tell to run.
		found := regexp.MustCompile(`(?m)(?:^ExecStart=/usr/local/bin/|\()quarry ([a-z]+ [^)\n]*?)(?: \$QUARRY_OPTIONS)?(?:,[^)\n]*)?\)?$`).FindAllStringSubmatch(string(raw), -1)
		if len(found) == 0 {
			t.Errorf("%s starts nothing", unit)
		}
		for _, m := range found {
			parses(t, unit, strings.Fields(m[1]))
		}
		if m := regexp.MustCompile(`QUARRY_OPTIONS="([^"]*)"`).FindSubmatch(raw); m != nil {
			text := strings.ReplaceAll(strings.ReplaceAll(string(m[1]), "\n#", " "), "…", "x")
			args := []string{strings.Fields(found[0][1])[0]}
			parses(t, unit, append(args, strings.Fields(text)...))
		}
	}
}
