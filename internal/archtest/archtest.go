// Package archtest checks the rules of the house that a compiler does not know:
// which package may import which, sizes, names, and what must not stand in the
// tree. Its own test runs it over the whole tree, so that a wrong arrow fails
// where it is drawn and not in a review.
package archtest

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	maxFileLines = 500
	maxFuncLines = 70
)

// Finding is one place that breaks one rule.
type Finding struct {
	Path string // slash-separated, from the top of the tree
	Line int    // from 1; 0 when it is about the whole file
	Rule string
	Text string // what is wrong and what to do
}

func (f Finding) String() string {
	return fmt.Sprintf("%s:%d: %s: %s", f.Path, f.Line, f.Rule, f.Text)
}

// notOurs are folders at the top that hold what is made and not written.
var notOurs = []string{".git", ".cache", "bin"}

// CheckTree checks every file below root except notOurs, testdata and what is
// not text.
func CheckTree(root fs.FS) ([]Finding, error) {
	var all []Finding
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains(notOurs, name) || d.Name() == "testdata" {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		content, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		found, err := CheckFile(name, content)
		all = append(all, found...)
		return err
	})
	slices.SortFunc(all, func(a, b Finding) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), cmp.Compare(a.Line, b.Line), strings.Compare(a.Text, b.Text))
	})
	return all, err
}

// CheckFile checks one file; name is its slash-separated path from the top of
// the tree. It fails on Go that cannot be parsed.
func CheckFile(name string, content []byte) ([]Finding, error) {
	if bytes.IndexByte(content, 0) >= 0 {
		return nil, nil
	}
	found := checkPaths(name, content)
	if path.Ext(name) != ".go" {
		return found, nil
	}
	f, err := parse(name, content)
	if err != nil {
		return nil, err
	}
	found = append(found, f.checkForbidden()...)
	found = append(found, f.checkPackageName()...)
	found = append(found, f.checkTodo()...)
	found = append(found, f.checkSkips()...)
	if !strings.HasSuffix(name, "_test.go") {
		found = append(found, f.checkArrows()...)
		found = append(found, f.checkSizes()...)
	}
	return found, nil
}

// goFile is a parsed Go file.
type goFile struct {
	path    string
	pkg     string // folder, which is how the tables name a package
	content []byte
	fset    *token.FileSet
	ast     *ast.File
}

func parse(name string, content []byte) (*goFile, error) {
	f := &goFile{path: name, pkg: path.Dir(name), content: content, fset: token.NewFileSet()}
	var err error
	f.ast, err = parser.ParseFile(f.fset, name, content, parser.ParseComments|parser.SkipObjectResolution)
	return f, err
}

func (f *goFile) line(p token.Pos) int { return f.fset.Position(p).Line }

func (f *goFile) found(p token.Pos, rule, format string, args ...any) Finding {
	return Finding{Path: f.path, Line: f.line(p), Rule: rule, Text: fmt.Sprintf(format, args...)}
}

// imports returns the file's import paths with their places.
func (f *goFile) imports(yield func(token.Pos, string) bool) {
	for _, spec := range f.ast.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			panic("archtest: the parser let through the import " + spec.Path.Value)
		}
		if !yield(spec.Pos(), p) {
			return
		}
	}
}

// within reports whether import path p is module or a package of it.
func within(p, module string) bool { return p == module || strings.HasPrefix(p, module+"/") }

func (f *goFile) checkArrows() (found []Finding) {
	row, known := arrows[f.pkg]
	if !known {
		return []Finding{f.found(f.ast.Package, "arrow", "package %s has no row in internal/archtest/table.go: decide what it may import and add one", f.pkg)}
	}
	for pos, p := range f.imports {
		if ours, ok := strings.CutPrefix(p, module+"/"); ok && !slices.Contains(row, ours) {
			found = append(found, f.found(pos, "arrow", "%s may not import %s: imports point down the table in internal/archtest/table.go", f.pkg, ours))
		}
		for theirs, owner := range onlyIn {
			if within(p, theirs) && !within(f.pkg, owner) {
				found = append(found, f.found(pos, "arrow", "only %s imports %s", owner, theirs))
			}
		}
	}
	return found
}

func (f *goFile) checkForbidden() (found []Finding) {
	for pos, p := range f.imports {
		if instead, ok := forbidden[p]; ok {
			found = append(found, f.found(pos, "import", "%s: %s", p, instead))
		}
	}
	return found
}

func (f *goFile) checkPackageName() (found []Finding) {
	for _, name := range append(strings.Split(f.pkg, "/"), strings.TrimSuffix(f.ast.Name.Name, "_test")) {
		if slices.Contains(vague, name) {
			return []Finding{f.found(f.ast.Name.Pos(), "name", "package %s: %q says nothing about what is inside", f.pkg, name)}
		}
	}
	return nil
}

func (f *goFile) checkSizes() (found []Finding) {
	if n := bytes.Count(f.content, []byte("\n")); n > maxFileLines {
		found = append(found, Finding{f.path, 0, "size", fmt.Sprintf("%d lines, at most %d: split the file by subject", n, maxFileLines)})
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		name := ""
		switch n := n.(type) {
		case *ast.FuncDecl:
			name = n.Name.Name
		case *ast.FuncLit:
			name = "function literal"
		default:
			return true
		}
		// From its first line to its closing brace; the comment above is not counted.
		first := n.Pos()
		if d, ok := n.(*ast.FuncDecl); ok {
			first = d.Type.Func
		}
		lines := f.line(n.End()) - f.line(first) + 1
		if lines > maxFuncLines {
			found = append(found, f.found(first, "size", "%s has %d lines, at most %d: move loops into functions of their own", name, lines, maxFuncLines))
		}
		return false // what is inside is shorter
	})
	return found
}

var (
	todo         = regexp.MustCompile(`\b(TODO|FIXME)\b`)
	todoNumbered = regexp.MustCompile(`\b(TODO|FIXME)\(#[0-9]+\)`)
)

// checkTodo looks at comments only, so that the words may stand in strings.
func (f *goFile) checkTodo() (found []Finding) {
	for _, group := range f.ast.Comments {
		for _, c := range group.List {
			for i, line := range strings.Split(c.Text, "\n") {
				if len(todo.FindAllString(line, -1)) > len(todoNumbered.FindAllString(line, -1)) {
					at := f.found(c.Pos(), "todo", "what is left to do has an issue number: write %s", "TODO(#12)")
					at.Line += i
					found = append(found, at)
				}
			}
		}
	}
	return found
}

// checkSkips looks for tests that pass without having run, but for package need's,
// which fail where everything is required.
func (f *goFile) checkSkips() (found []Finding) {
	tests := false
	for _, p := range f.imports {
		tests = tests || p == "testing"
	}
	if !tests || f.pkg == "internal/need" {
		return nil
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		of, _ := s.X.(*ast.Ident)
		switch {
		case slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, s.Sel.Name):
			found = append(found, f.found(s.Pos(), "skip", "%s: name what is missing with need.Missing, which fails when REQUIRE_ALL=1", s.Sel.Name))
		case s.Sel.Name == "Short" && of != nil && of.Name == "testing":
			found = append(found, f.found(s.Pos(), "skip", "testing.Short: a test that does less with -short proves less"))
		}
		return true
	})
	return found
}

// machinePath matches folders of the machines quarry was made on, which no
// reader has.
var machinePath = regexp.MustCompile(`/(work|farm)/`)

func checkPaths(name string, content []byte) (found []Finding) {
	n := 0
	for line := range bytes.Lines(content) {
		n++
		if m := machinePath.Find(line); m != nil {
			found = append(found, Finding{name, n, "path", fmt.Sprintf("%s is a folder of one machine: make it a parameter or a relative path", m)})
		}
	}
	return found
}
