// Command helper copies its stdin to its stdout and exits with its argument; with 0
// it sleeps, and below 0 it takes a moment and says "undone".
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
	if code < 0 {
		time.Sleep(300 * time.Millisecond)
		os.Stdout.WriteString("undone")
		code = 0
	}
	os.Exit(code)
}
