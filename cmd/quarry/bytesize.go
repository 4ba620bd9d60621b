package main

import (
	"fmt"
	"time"
)

// byteSize is a flag that is a number of bytes, such as 512M or 20G.
type byteSize struct {
	text  string
	bytes int64
}

// Set implements pflag.Value.
func (b *byteSize) Set(text string) error {
	n, err := parseSize(text)
	if err == nil && n == 0 {
		err = fmt.Errorf("%q: want more than none", text)
	}
	b.text, b.bytes = text, n
	return err
}

// String implements pflag.Value.
func (b *byteSize) String() string { return b.text }

// Type implements pflag.Value.
func (b *byteSize) Type() string { return "bytes" }

// mib is the size in MiB of a flag. Less than one is refused: 0 would be the default,
// and who leaves the unit out means another one.
func (b *byteSize) mib(flag string) (int64, error) {
	if b.text != "" && b.bytes < 1<<20 {
		return 0, fmt.Errorf("%w: --%s %s: want 1M or more: a number without K, M, G or T is bytes", errUsage, flag, b.text)
	}
	return b.bytes >> 20, nil
}

// units is the time of a flag in whole units, as the worker counts it. What is between
// two is refused: less than one would be 0, which is none at all.
func units(flag string, d, unit time.Duration) (int64, error) {
	if d%unit != 0 {
		return 0, fmt.Errorf("%w: --%s %v: want a multiple of %v", errUsage, flag, d, unit)
	}
	return int64(d / unit), nil
}
