package main

import "fmt"

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
