package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"quarry/api"
	"quarry/converter"
)

// limits is what --limit NAME=VALUE, which may be given many times, has said. The
// last value of a name counts.
type limits map[string]int64

// limitUsage is the flag's line in a command's help.
const limitUsage = "raise or lower the limit `NAME=VALUE` (see above); may be given many times"

// set takes one value of the flag.
func (l *limits) set(s string) error {
	name, value, err := converter.ParseLimit(s)
	if err != nil {
		return err
	}
	if *l == nil {
		*l = limits{}
	}
	(*l)[name] = value
	return nil
}

// limitNamed is how an error names the limit that was reached. Text is all that
// comes from a server.
var limitNamed = regexp.MustCompile(`\(limit ([A-Za-z]+)\)`)

// limitHint adds to a failed conversion how the limit that it names is changed.
func limitHint(err error) error {
	m := limitNamed.FindAllStringSubmatch(err.Error(), -1)
	if m == nil || !errors.Is(err, api.ErrImageFailed) {
		return err
	}
	return fmt.Errorf("%w: --limit %s=VALUE changes it", err, m[len(m)-1][1])
}

// limitHelp is the part of a command's help that speaks of limits.
func limitHelp() string {
	return fmt.Sprintf(`An image that costs more than a limit is refused, with the limit's name. --limit NAME=VALUE
changes one; a VALUE may end in Ki, Mi, Gi or Ti. docs/conversion.md and docs/sources.md say
what they bound and what they are by default:
  %s`, wrapWords(converter.LimitNames(), 88, "\n  "))
}

// wrapWords joins words with commas into lines of at most width bytes.
func wrapWords(words []string, width int, newline string) string {
	var b strings.Builder
	line := 0
	for i, w := range words {
		if i > 0 {
			b.WriteString(",")
			line++
			if line+1+len(w) > width {
				b.WriteString(newline)
				line = 0
			} else {
				b.WriteString(" ")
				line++
			}
		}
		b.WriteString(w)
		line += len(w)
	}
	return b.String()
}
