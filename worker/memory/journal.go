package memory

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// setting is a file of a control group and what to write there.
type setting struct{ file, value string }

// journaled are the files that a journal may name: those that a reclaim changes.
var journaled = map[string]bool{"memory.swap.max": true, "memory.swappiness": true, "memory.limit_in_bytes": true}

// change sets the first of the settings, all of one file, that the kernel takes, and
// returns what undoes it. A file that is not there is left so: the kernel counts no
// swap, and limits none.
func (g *Group) change(settings ...setting) (undo func() error, err error) {
	return g.changeBy(writeFile, settings...)
}

func (g *Group) changeBy(write func(path, value string) error, settings ...setting) (undo func() error, err error) {
	name := settings[0].file
	raw, err := readBounded(g.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, err
	}
	was := strings.TrimSpace(raw)
	noted, err := g.note(setting{name, was})
	if err != nil {
		return nil, err
	}
	undo = func() error {
		if err := writeFile(g.path(name), was); err != nil {
			return fmt.Errorf("set %s back to %s: %w", name, was, err)
		}
		return noted()
	}
	for _, s := range settings {
		if err = write(g.path(name), s.value); err == nil {
			return undo, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("set %s to %s: %w", name, settings[0].value, err), undo())
}

// note puts a value into the journal before it is changed. No sync: a journal has to
// outlive the worker, not the machine, with which the group ends too. It returns what
// takes the line out again.
func (g *Group) note(s setting) (done func() error, err error) {
	if g.journal == "" {
		return func() error { return nil }, nil
	}
	before, err := readBounded(g.journal)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := replace(g.journal, before+s.file+" "+s.value+"\n"); err != nil {
		return nil, fmt.Errorf("note %s before it is changed: %w", s.file, err)
	}
	return func() error { return replace(g.journal, before) }, nil
}

// replace gives a file its content at once, or removes it.
func replace(path, content string) error {
	if content == "" {
		return os.Remove(path)
	}
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Mend sets back what the journal says was changed when the worker was killed.
func (g *Group) Mend() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.journal == "" {
		return nil
	}
	raw, err := readBounded(g.journal)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSuffix(raw, "\n"), "\n")
	for i := len(lines) - 1; i >= 0; i-- { // the oldest value last
		name, value, ok := strings.Cut(lines[i], " ")
		if !ok || !journaled[name] {
			return fmt.Errorf("%s: line %d is not of a journal", g.journal, i+1)
		}
		if err := writeFile(g.path(name), value); err != nil {
			return fmt.Errorf("set %s back to %s: %w", name, value, err)
		}
	}
	return os.Remove(g.journal)
}
