package holder

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
)

// The sleeper is the first process of a sandbox that has no entrypoint of its own:
// a static program that reaps nothing by itself but makes the kernel reap whatever
// becomes its child, and sleeps through every signal that can be slept through: what
// ends the Sentry politely, as a machine that goes down does, must not look as if the
// sandbox had ended by itself. It is given to runsc as an open file, so that nothing of
// ours stands in the image; it has no libc, so that it is a page.
//
// It writes to that page, which makes it memory of its own: a checkpoint has memory,
// and not the file, which a restore cannot be given.

// Numbers of the ELF format and of system calls, as elf(5) and the kernel's tables
// have them.
const (
	elfHeaderSize, elfProgramHeaderSize = 64, 56
	machineX86, machineARM              = 62, 183
	sleeperBase                         = 0x400000
	sleeperAlign                        = 0x10000 // at least a page anywhere
)

// sigIgnored is the kernel's struct sigaction: handler SIG_IGN, no flags, no mask.
var sigIgnored = []byte{0: 1, 31: 0}

// allSignals is the kernel's sigset_t.
var allSignals = bytes.Repeat([]byte{0xff}, 8)

// sleeper returns the program for an architecture of Go's name.
func sleeper(arch string) ([]byte, error) {
	var code []byte
	var machine uint16
	switch arch {
	case "amd64":
		code, machine = sleeperX86(), machineX86
	case "arm64":
		code, machine = sleeperARM(), machineARM
	default:
		return nil, fmt.Errorf("a sandbox needs an entrypoint on %s", arch)
	}
	const start = elfHeaderSize + elfProgramHeaderSize
	size := uint64(start + len(code))
	var b bytes.Buffer
	b.WriteString("\x7fELF\x02\x01\x01") // 64 bits, little endian, version 1
	b.Write(make([]byte, 9))
	le := func(v any) { binary.Write(&b, binary.LittleEndian, v) } // to memory: it does not fail
	le([]uint16{2, machine})                                       // executable
	le(uint32(1))
	le([]uint64{sleeperBase + start, elfHeaderSize, 0}) // entry, program headers, no sections
	le(uint32(0))
	le([]uint16{elfHeaderSize, elfProgramHeaderSize, 1, 0, 0, 0})
	le([]uint32{1, 7}) // load it all, to be read, written and executed
	le([]uint64{0, sleeperBase, sleeperBase, size, size, sleeperAlign})
	b.Write(code)
	return b.Bytes(), nil
}

func sleeperX86() []byte {
	code := []byte{
		0xc6, 0x05, 83, 0, 0, 0, 0, // mov byte [rip+83], 0: the last of sigIgnored, as it is
		0xb8, 13, 0, 0, 0, // mov eax, rt_sigaction
		0xbf, 17, 0, 0, 0, // mov edi, SIGCHLD
		0x48, 0x8d, 0x35, 35, 0, 0, 0, // lea rsi, [rip+35]: sigIgnored
		0x31, 0xd2, // xor edx, edx
		0x41, 0xba, 8, 0, 0, 0, // mov r10d, 8: the size of a mask
		0x0f, 0x05, // syscall
		0xb8, 14, 0, 0, 0, // mov eax, rt_sigprocmask
		0x31, 0xff, // xor edi, edi: SIG_BLOCK
		0x48, 0x8d, 0x35, 43, 0, 0, 0, // lea rsi, [rip+43]: allSignals
		0x0f, 0x05, // syscall
		0xb8, 34, 0, 0, 0, // again: mov eax, pause
		0x0f, 0x05, // syscall
		0xeb, 0xf7, // jmp again
	}
	// 35 bytes from the end of the first lea: 2+6+2, 5+2+7+2, 5+2+2; 43 from that of the
	// second: 2, 5+2+2, and sigIgnored.
	return slices.Concat(code, sigIgnored, allSignals)
}

func sleeperARM() []byte {
	movz := func(reg, imm uint32) uint32 { return 0xd2800000 | imm<<5 | reg }
	const svc = 0xd4000001
	code := []uint32{
		movz(8, 134), movz(0, 17), // rt_sigaction, SIGCHLD
		0x10000000 | 16<<5 | 1,          // adr x1, 64 bytes from here: sigIgnored
		0x39000000 | 31<<10 | 1<<5 | 31, // strb wzr, [x1, 31]: its last byte, as it is
		movz(2, 0), movz(3, 8), svc,     // no old one, the size of a mask
		movz(8, 135), movz(0, 0), // rt_sigprocmask, SIG_BLOCK
		0x10000000 | 17<<5 | 1, svc, // adr x1, 68 bytes from here: allSignals
		movz(8, 73), movz(0, 0), movz(1, 0), movz(2, 0), movz(3, 0), svc, // again: ppoll of nothing
		0x17fffffa, // b again, 6 instructions back
	}
	b, err := binary.Append(nil, binary.LittleEndian, code)
	if err != nil {
		panic(err) // a slice of numbers has a size
	}
	return slices.Concat(b, sigIgnored, allSignals)
}
