// Command hold holds memory in a guest, of the size in MiB that it is given. For each
// line on stdin it does what the line says and answers with one: "scattered" and
// "inorder" touch every page, "quarter" the first quarter of them, "rewrite"
// writes to those what is there, "sum" sums all bytes.
package main

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"time"
)

func main() {
	size, err := strconv.Atoi(os.Args[1])
	if err != nil {
		panic(err)
	}
	size <<= 20
	b, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	const page = 4096
	// Half of a page is random, so that it compresses as memory of programs does.
	src := rand.NewChaCha8([32]byte{1})
	for at := 0; at < size; at += page {
		src.Read(b[at : at+page/2])
	}
	order := rand.New(rand.NewPCG(1, 2)).Perm(size / page)
	fmt.Println("ready")
	var sink byte
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		begun := time.Now()
		switch in.Text() {
		case "scattered":
			for _, p := range order {
				sink += b[p*page]
			}
			fmt.Println(time.Since(begun).Microseconds())
		case "inorder":
			for at := 0; at < size; at += page {
				sink += b[at]
			}
			fmt.Println(time.Since(begun).Microseconds())
		case "quarter":
			for at := 0; at < size/4; at += page {
				sink += b[at]
			}
			fmt.Println(time.Since(begun).Microseconds())
		case "rewrite":
			nothing := byte(len(in.Text()) - len("rewrite"))
			for at := 0; at < size/4; at += page {
				b[at] += nothing
			}
			fmt.Println(time.Since(begun).Microseconds())
		case "hello":
			fmt.Println("hello")
		case "sum":
			fmt.Printf("%x\n", sha256.Sum256(b))
		}
	}
	os.Exit(int(sink & 1))
}
