package dir_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/dir"
)

// writerEnv makes the test binary a writer of objects and entries, to be killed.
const writerEnv = "QUARRY_TEST_DIR_WRITER"

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		fmt.Println(writeForEver(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func body(n uint64) []byte { return bytes.Repeat([]byte{byte(n)}, 100<<10+int(n)) }

// writeForEver stores object n, then entry n, as the store does with packs.
func writeForEver(path string) error {
	ctx := context.Background()
	b, err := dir.Open(path)
	if err != nil {
		return err
	}
	n := uint64(0)
	for _, err := range b.Read(ctx, 1) {
		if err != nil {
			return err
		}
		n++
	}
	for {
		n++
		p := body(n)
		if err := b.Put(ctx, fmt.Sprintf("packs/%d/%d", n%7, n), bytes.NewReader(p), int64(len(p))); err != nil {
			return err
		}
		if err := b.Append(ctx, n, fmt.Append(nil, n)); err != nil {
			return err
		}
	}
}

func TestKilledWriterLeavesWholeObjects(t *testing.T) {
	path := t.TempDir()
	last := 0
	for round := range 5 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), writerEnv+"="+path)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		must(t, cmd.Start())
		time.Sleep(time.Duration(60+17*round) * time.Millisecond)
		must(t, cmd.Process.Kill())
		cmd.Wait()
		if out.Len() > 0 {
			t.Fatalf("the writer failed: %s", &out)
		}
		b := open(t, path)
		entries := buckettest.Entries(t, b, 1)
		for _, e := range entries {
			key := fmt.Sprintf("packs/%d/%d", e.N%7, e.N)
			if !bytes.Equal(buckettest.Bytes(t, b, key), body(e.N)) {
				t.Errorf("round %d: object %d is not whole", round, e.N)
			}
		}
		// An object whose entry was not written may be there, but only whole.
		if n := len(buckettest.Keys(t, b, "")); n != len(entries) && n != len(entries)+1 {
			t.Errorf("round %d: got %d objects for %d entries", round, n, len(entries))
		}
		last = len(entries)
	}
	if last == 0 {
		t.Error("the writer wrote nothing before it was killed")
	}
}
