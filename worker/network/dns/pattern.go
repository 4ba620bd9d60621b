package dns

import (
	"fmt"
	"net/netip"
	"strings"
)

// MaxName is the longest name: 255 bytes on the wire, as text without its last dot.
const MaxName = 253

// Pattern is the names that a rule allows: one, all below one, or all.
type Pattern struct {
	name  string // lower case, without a dot at the end
	below bool   // those below name; with an empty name all
}

// ParsePattern reads NAME, *.NAME or *. A name of other letters than those of DNS is
// written in its ASCII form.
func ParsePattern(s string) (Pattern, error) {
	if s == "*" {
		return Pattern{below: true}, nil
	}
	name, below := strings.CutPrefix(s, "*.")
	name, err := canonical(name)
	if err != nil {
		return Pattern{}, fmt.Errorf("host %.300q: %w", s, err)
	}
	if _, err := netip.ParseAddr(name); err == nil {
		return Pattern{}, fmt.Errorf("host %s is an address: write it as a cidr", name)
	}
	return Pattern{name, below}, nil
}

// Match reports whether a name, as Query has it, is allowed.
func (p Pattern) Match(name string) bool {
	switch {
	case !p.below:
		return name == p.name
	case p.name == "":
		return name != ""
	}
	head, ok := strings.CutSuffix(name, p.name)
	return ok && len(head) > 1 && head[len(head)-1] == '.'
}

// canonical returns the one form of a name that is compared: lower case, without a
// dot at the end.
func canonical(s string) (string, error) {
	s = strings.TrimSuffix(s, ".")
	if s == "" || len(s) > MaxName {
		return "", fmt.Errorf("a name has 1 to %d characters", MaxName)
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 {
			return "", fmt.Errorf("a label has 1 to 63 characters")
		}
		for _, c := range []byte(label) {
			if !inLabel(c) {
				return "", fmt.Errorf("%q is not in a name; one of other letters is written as xn--…", string(rune(c)))
			}
		}
	}
	return strings.ToLower(s), nil
}

func inLabel(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}
