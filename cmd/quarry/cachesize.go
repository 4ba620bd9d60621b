package main

import (
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"quarry/store/cache"
)

// cacheSize is the limit of a worker's disk cache as --cache-size says it.
type cacheSize struct{ text string }

func (s *cacheSize) flag(c *cobra.Command) {
	c.Flags().StringVar(&s.text, "cache-size", os.Getenv("QUARRY_CACHE_SIZE"),
		"bytes of chunks kept on disk, as 512M or 20G, or none; default is a tenth of the disk, and 20G at most; a lower one evicts and ends no pin; of the reader that this command starts when none runs (env QUARRY_CACHE_SIZE)")
}

// bytes returns what reader.Config takes: 0 for the default, less for none.
func (s cacheSize) bytes() (int64, error) {
	switch s.text {
	case "":
		return 0, nil
	case "none":
		return -1, nil
	}
	n, err := parseSize(s.text)
	if err != nil {
		return 0, fmt.Errorf("%w: --cache-size %w", errUsage, err)
	}
	if n < cache.MinLimit || n > cache.MaxLimit {
		return 0, fmt.Errorf("%w: --cache-size %s: want %d MiB to %d GiB, or none", errUsage, s.text, int64(cache.MinLimit)>>20, int64(cache.MaxLimit)>>30)
	}
	return n, nil
}

// parseSize reads a number of bytes, with K, M, G or T behind it for powers of
// 1024.
func parseSize(text string) (int64, error) {
	digits, shift := text, 0
	if k := strings.IndexAny(text, "KMGT"); k >= 0 && k == len(text)-1 {
		digits, shift = text[:k], 10*(1+strings.IndexByte("KMGT", text[k]))
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || bits.Len64(n)+shift > 63 {
		return 0, fmt.Errorf("%q: want a number of bytes, with K, M, G or T behind it if any", text)
	}
	return int64(n) << shift, nil
}
