// Command seven says its arguments on its file 7.
package main

import (
	"fmt"
	"os"
)

func main() { fmt.Fprintln(os.NewFile(7, "seven"), os.Args) }
