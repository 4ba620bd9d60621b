package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"quarry/nbd/attach"
	"quarry/nbd/blockdev"
)

// readerFlags are what a command passes on to the reader that it starts.
type readerFlags struct {
	cacheSize   cacheSize
	readTimeout readTimeout
	sleep       bool
}

func (f *readerFlags) flags(c *cobra.Command) {
	f.cacheSize.flag(c)
	f.readTimeout.flag(c)
	c.Flags().BoolVar(&f.sleep, "deep-sleep", os.Getenv("QUARRY_DEEP_SLEEP") != "",
		"let idle processors sleep as deep as the kernel likes while reads follow one another: saves power, makes reads slower (env QUARRY_DEEP_SLEEP)")
}

// check finds mistakes before anything is started.
func (f readerFlags) check() error {
	if _, err := f.cacheSize.bytes(); err != nil {
		return err
	}
	_, err := f.readTimeout.duration()
	return err
}

// args passes the flags on.
func (f readerFlags) args() (args []string) {
	if f.cacheSize.text != "" {
		args = append(args, "--cache-size", f.cacheSize.text)
	}
	if f.readTimeout.text != "" {
		args = append(args, "--read-timeout", f.readTimeout.text)
	}
	if f.sleep {
		args = append(args, "--deep-sleep")
	}
	return args
}

const (
	minReadTimeout = time.Second
	// maxReadTimeout leaves half a minute of the shim's deadline, after which the
	// kernel has EIO anyway.
	maxReadTimeout = attach.DefaultDeadline - 30*time.Second
)

// readTimeout is how long a read of an image waits for a good copy, as
// --read-timeout says it.
type readTimeout struct{ text string }

func (t *readTimeout) flag(c *cobra.Command) {
	c.Flags().StringVar(&t.text, "read-timeout", os.Getenv("QUARRY_READ_TIMEOUT"), fmt.Sprintf(
		"how long a read of an image waits for a good copy before it fails with EIO, %s to %s, default %s; of the reader that this command starts when none runs; a store that sends nothing for so long is given up, too (env QUARRY_READ_TIMEOUT)",
		minReadTimeout, maxReadTimeout, blockdev.DefaultTimeout))
}

// duration returns what reader.Config takes: 0 for the default.
func (t readTimeout) duration() (time.Duration, error) {
	if t.text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(t.text)
	if err != nil || d < minReadTimeout || d > maxReadTimeout {
		return 0, fmt.Errorf("%w: --read-timeout %q: want %s to %s, as 90s", errUsage, t.text, minReadTimeout, maxReadTimeout)
	}
	return d, nil
}
