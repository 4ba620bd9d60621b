package tree

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"quarry/rafs"
	"quarry/store/image"
)

// attack is a layer that somebody made to cost much. The work is counted, not
// timed: it may be linear in the bytes that were sent, plus the steps behind
// symlinks that a limit bounds.
type attack struct {
	name    string
	lower   []image.Entry // of the layer below
	entries func() []image.Entry
	words   string // of an error; none: the layer is applied
}

var attacks = []attack{
	{name: "a path of 64 Ki names", entries: func() []image.Entry {
		return []image.Entry{reg(strings.Repeat("d/", 1<<16) + "f")}
	}, words: "more than 4095 components"},
	{name: "a marker below 64 Ki names", entries: func() []image.Entry {
		return []image.Entry{reg(strings.Repeat("d/", 1<<16) + ".wh.f")}
	}, words: "more than 4095 components"},
	{name: "many files at the bottom of the deepest tree", entries: func() (es []image.Entry) {
		for i := range 500 {
			es = append(es, reg(strings.Repeat("d/", DefaultDepth-1)+fmt.Sprint(i)))
		}
		return es
	}},
	{name: "a chain of symlinks longer than one path may lead through", entries: func() []image.Entry {
		return append(chain(5000, 1), reg("0/x"))
	}, words: errLinks.Error()},
	{name: "many files behind a chain of long symlinks", entries: func() (es []image.Entry) {
		es = chain(250, 2000)
		for i := range 10_000 {
			es = append(es, reg(fmt.Sprintf("0/%d", i)))
		}
		return es
	}, words: "through symlinks for more than"},
	{name: "many markers behind a chain of long symlinks", lower: chain(250, 2000), entries: func() (es []image.Entry) {
		for i := range 10_000 {
			es = append(es, reg(fmt.Sprintf("0/.wh.%d", i)))
		}
		return es
	}, words: "through symlinks for more than"},
	{name: "a marker behind symlinks, and many entries that might replace them", lower: chain(250, 1), entries: func() (es []image.Entry) {
		es = append(es, reg("0/.wh.x"))
		for i := range 10_000 {
			es = append(es, reg(fmt.Sprintf("1/2/../%d", i)))
		}
		return es
	}},
	{name: "symlinks that lead to one another twice each", entries: func() (es []image.Entry) {
		for i := range 300 {
			es = append(es, link(fmt.Sprint(i), fmt.Sprintf("%d/../%d", i+1, i+1)))
		}
		return append(es, image.Entry{Name: "300", Type: image.TypeDir}, reg("0/x"))
	}, words: errLinks.Error()},
	{name: "a loop of symlinks under every entry", entries: func() []image.Entry {
		return []image.Entry{link("a", "b/c"), link("b", "a/c"), reg("a/x")}
	}, words: errLinks.Error()},
	{name: "many hard links", entries: func() (es []image.Entry) {
		es = append(es, reg("f"))
		for i := range 50_000 {
			es = append(es, image.Entry{Name: fmt.Sprint(i), Type: image.TypeLink, Link: "f"})
		}
		return es
	}},
	{name: "many hard links that each set an xattr on a file with thousands", entries: func() (es []image.Entry) {
		es = append(es, reg("f"))
		for i := range 9000 {
			es[0].Xattrs = append(es[0].Xattrs, rafs.Xattr{Name: fmt.Sprintf("user.%04d", i)[:6+i%4]})
		}
		for i := range 50_000 {
			es = append(es, image.Entry{Name: fmt.Sprint(i), Type: image.TypeLink, Link: "f", Xattrs: []rafs.Xattr{{Name: "user.0", Value: []byte("v")}}})
		}
		return es
	}},
	{name: "more xattrs than listxattr can return", entries: func() (es []image.Entry) {
		es = append(es, reg("f"))
		for i := range 100_000 {
			es[0].Xattrs = append(es[0].Xattrs, rafs.Xattr{Name: fmt.Sprintf("user.%06d", i)})
		}
		return es
	}, words: "XattrBytes"},
	{name: "a directory given again and again", entries: func() (es []image.Entry) {
		for i := range 20_000 {
			es = append(es, image.Entry{Name: "d", Type: image.TypeDir}, reg(fmt.Sprintf("d/%d", i)))
		}
		return es
	}},
	{name: "a full directory hidden again and again", entries: func() (es []image.Entry) {
		for i := range 20_000 {
			es = append(es, reg(fmt.Sprintf("d/%d", i)), reg("d/.wh..wh..opq"), reg(".wh.d"))
		}
		return es
	}},
}

func reg(name string) image.Entry { return image.Entry{Name: name, Type: image.TypeReg} }

func link(name, target string) image.Entry {
	return image.Entry{Name: name, Type: image.TypeSymlink, Link: target}
}

// chain is n symlinks, each to the next one by way of dots components, and the
// directory they end in.
func chain(n, dots int) (es []image.Entry) {
	for i := range n {
		es = append(es, link(fmt.Sprint(i), strings.Repeat("./", dots)+fmt.Sprint(i+1)))
	}
	return append(es, image.Entry{Name: fmt.Sprint(n), Type: image.TypeDir})
}

func size(es []image.Entry) (n int64) {
	for _, e := range es {
		n += int64(len(e.Name) + len(e.Link))
		for _, x := range e.Xattrs {
			n += int64(len(x.Name) + len(x.Value))
		}
	}
	return n
}

func TestHostileLayersCostLittle(t *testing.T) {
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			es := a.entries()
			m := NewMerger(Config{})
			if err := m.Apply(a.lower); err != nil {
				t.Fatal(err)
			}
			err := m.Apply(es)
			switch {
			case a.words == "" && err != nil:
				t.Errorf("error %v", err)
			case a.words != "" && (err == nil || !strings.Contains(err.Error(), a.words)):
				t.Errorf("error %v, want one with %q", err, a.words)
			}
			if most := m.cfg.Limits.LinkSteps + 1; m.linkSteps > most {
				t.Errorf("%d steps behind symlinks, want at most %d", m.linkSteps, most)
			}
			sent := size(a.lower) + size(es)
			if most := 2*sent + m.linkSteps; m.steps > most {
				t.Errorf("%d steps for %d bytes and %d steps behind symlinks, want at most %d", m.steps, sent, m.linkSteps, most)
			}
			t.Logf("%d bytes cost %d steps, %d of them behind symlinks", sent, m.steps, m.linkSteps)
		})
	}
}

// New names of xattrs, set in the worst order by one hard link each, move those
// behind them. There can be 9362 names of a file: 64 KiB, 7 bytes for "user.a".
func TestXattrsSetInTheWorstOrderAreBounded(t *testing.T) {
	es := []image.Entry{reg("f")}
	for i := range 6000 {
		es = append(es, image.Entry{Name: "l", Type: image.TypeLink, Link: "f", Xattrs: []rafs.Xattr{{Name: fmt.Sprintf("user.%04d", 9999-i)}}})
	}
	m := NewMerger(Config{})
	if err := m.Apply(es); err != nil {
		t.Fatal(err)
	}
	const mostNames = rafs.MaxXattrNames / int64(len("user.a")+1)
	if most := int64(len(es)) * mostNames / 2; m.steps > most {
		t.Errorf("%d steps, want at most %d", m.steps, most)
	}
}

// Steps behind symlinks are counted over all layers, so that an image of many
// layers gets no more of them than one of a single layer.
func TestStepsAreCountedOverAllLayers(t *testing.T) {
	m := NewMerger(Config{Limits: Limits{LinkSteps: 100}})
	if err := m.Apply([]image.Entry{link("l", "a/b/c")}); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := m.Apply([]image.Entry{reg("l/x")}); err != nil {
			if i != 33 {
				t.Errorf("layer %d is refused, want the 35th: %v", i+2, err)
			}
			return
		}
	}
	t.Error(errors.New("no layer is refused"))
}
