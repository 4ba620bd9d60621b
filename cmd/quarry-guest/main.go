// Command quarry-guest runs in a sandbox for one call of package guest and ends. It
// reads a request from stdin and answers on stdout.
package main

func main() {}
