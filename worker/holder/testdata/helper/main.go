// Command helper copies its stdin to its stdout and exits with its argument; with 0
// it sleeps.
package main

import (
	"io"
	"os"
	"strconv"
	"time"
)

func main() {
	code, err := strconv.Atoi(os.Args[1])
	if err != nil {
		os.Exit(1)
	}
	if code == 0 {
		time.Sleep(time.Hour)
	}
	if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
		os.Exit(1)
	}
	os.Exit(code)
}
