package sandboxes

import (
	_ "embed"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"quarry/worker/sandbox"
)

//go:embed openapi.yaml
var openapi []byte

type document struct {
	Info  struct{ Description string }
	Paths map[string]map[string]yaml.Node
	Parts struct {
		Schemas map[string]struct {
			Properties map[string]yaml.Node
			Required   []string
		}
	} `yaml:"components"`
}

type operation struct {
	Token      string `yaml:"x-token"`
	Parameters []struct{ Name, In string }
}

func readDocument(t *testing.T) document {
	t.Helper()
	var d document
	if err := yaml.Unmarshal(openapi, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestTheDocumentHasTheRoutesAndNoOthers(t *testing.T) {
	d := readDocument(t)
	tokens := map[who]string{anyone: "none", owner: "sandbox", maker: "run", manager: "admin"}
	var want, got []string
	for _, rt := range routes {
		query := slices.Sorted(slices.Values(rt.query))
		want = append(want, fmt.Sprint(rt.method, " ", rt.path, " ", tokens[rt.who], " ", query))
	}
	for path, ops := range d.Paths {
		for method, node := range ops {
			if method == "parameters" {
				continue
			}
			var op operation
			if err := node.Decode(&op); err != nil {
				t.Fatal(err)
			}
			var query []string
			for _, p := range op.Parameters {
				if p.In == "query" {
					query = append(query, p.Name)
				}
			}
			slices.Sort(query)
			got = append(got, fmt.Sprint(strings.ToUpper(method), " ", path, " ", op.Token, " ", query))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the document has\n%s\nthe table has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestTheDocumentHasTheFieldsOfTheTypes(t *testing.T) {
	d := readDocument(t)
	seen := map[string]bool{"Refusal": true}
	for _, v := range []any{
		Error{}, sandbox.Spec{}, sandbox.Sandbox{}, SandboxesPage{}, TTLRequest{}, sandbox.Usage{}, ExecRequest{}, ExecAnswer{}, ExecsPage{},
		Frame{}, StdinAnswer{}, SignalRequest{}, WriteAnswer{}, FilesPage{}, sandbox.ExecState{}, sandbox.FileInfo{}, sandbox.Event{}, sandbox.NodeStatus{}, DrainRequest{},
	} {
		compareFields(t, d, reflect.TypeOf(v), seen)
	}
	for name := range d.Parts.Schemas {
		if !seen[name] {
			t.Errorf("schema %s is of no type", name)
		}
	}
}

// optional are the fields that Go always writes and that a request need not have.
var optional = []string{"Spec.network", "DrainRequest.end"}

func compareFields(t *testing.T, d document, rt reflect.Type, seen map[string]bool) {
	for rt.Kind() == reflect.Pointer || rt.Kind() == reflect.Slice || rt.Kind() == reflect.Map {
		rt = rt.Elem()
	}
	if rt.Kind() != reflect.Struct || !strings.Contains(rt.PkgPath(), "sandbox") || seen[rt.Name()] {
		return
	}
	seen[rt.Name()] = true
	var want, required []string
	for _, f := range reflect.VisibleFields(rt) {
		if !f.Anonymous { // the fields of an embedded one are this type's
			compareFields(t, d, f.Type, seen)
		}
		name, how, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous || name == "-" {
			continue
		}
		want = append(want, name)
		if !strings.HasPrefix(how, "omit") && !slices.Contains(optional, rt.Name()+"."+name) {
			required = append(required, name)
		}
	}
	if got := d.Parts.Schemas[rt.Name()].Required; !slices.Equal(got, required) {
		t.Errorf("schema %s requires %v, the type always has %v", rt.Name(), got, required)
	}
	slices.Sort(want)
	got := slices.Sorted(maps.Keys(d.Parts.Schemas[rt.Name()].Properties))
	if !slices.Equal(got, want) {
		t.Errorf("schema %s has %v, the type has %v", rt.Name(), got, want)
	}
}

func TestTheDocumentNamesTheCodes(t *testing.T) {
	d := readDocument(t)
	for _, r := range errorTable {
		if r.status == statusClientGone {
			continue
		}
		if want := fmt.Sprintf(" %s %d", r.code, r.status); !strings.Contains(strings.ReplaceAll(d.Info.Description, "\n", " "), want) {
			t.Errorf("the document does not say%s", want)
		}
	}
}

func TestEveryRowOfTheErrorTableIsReachable(t *testing.T) {
	codes := map[string]bool{}
	for _, r := range errorTable {
		if codes[r.code] {
			t.Errorf("code %s stands twice", r.code)
		}
		codes[r.code] = true
		e := toError(fmt.Errorf("wrapped: %w", r.target))
		if e.Code != r.code || e.Status != r.status {
			t.Errorf("%v becomes %d %s, want %d %s", r.target, e.Status, e.Code, r.status, r.code)
		}
		if (e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable) && e.RetryAfter == 0 {
			t.Errorf("%s says nothing of when to come again", e.Code)
		}
	}
}
