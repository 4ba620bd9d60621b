package cache_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"quarry/store"
	"quarry/store/cache"
	"quarry/store/chunk"
)

// tally is what reading a whole cache found.
type tally struct{ right, wrong, missing int }

// readAll reads every chunk as a device does that verifies: wrong bytes have
// another digest, are dropped, and are missing then.
func readAll(t *testing.T, c *cache.Cache, all []named) (found tally) {
	t.Helper()
	buf := make([]byte, chunk.MaxSize)
	for _, n := range all {
		p := buf[:len(n.p)]
		switch err := c.ReadAt(n.Digest, p, 0); {
		case errors.Is(err, store.ErrNotFound):
			found.missing++
		case err != nil:
			t.Fatal(err)
		case bytes.Equal(p, n.p):
			found.right++
		default:
			found.wrong++
			if chunk.Sum(p) == n.Digest {
				t.Fatal("wrong bytes verify")
			}
			c.Drop(n.Digest)
			if err := c.ReadAt(n.Digest, p, 0); !errors.Is(err, store.ErrNotFound) {
				t.Fatalf("a dropped chunk is read again: %v", err)
			}
		}
	}
	return found
}

// cutSeeds is how many histories of four power cuts are tried: 10 s each with -race.
const cutSeeds = 4

// TestPowerCut cuts the power in the middle of work, again and again, on a disk
// that then holds any mixture of what was written, what was there before, zeros
// and parts of other files.
func TestPowerCut(t *testing.T) {
	all := make([]named, 600)
	rnd := rand.New(rand.NewPCG(5, 5))
	for i := range all {
		all[i] = name(content(i, 1+rnd.IntN([]int{600, chunk.DefaultSize, chunk.DefaultSize}[i%3])))
	}
	pinned := list(all[:40])
	var sum tally
	pins := 0
	evicted := int64(0)
	for seed := range uint64(cutSeeds) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		m := newMemFS()
		cfg := cache.Config{FS: m, Limit: cache.MinLimit}
		c := open(t, cfg)
		for cut := range 4 {
			work(t, c, all, rnd)
			if cut == 1 {
				if err := c.Pin(chunk.Digest{1}, pinned); err != nil {
					t.Fatal(err)
				}
			}
			work(t, c, all, rnd)
			evicted += c.Stats().Evicted
			m = m.crash(rnd)
			c.Close() // the old process's writes go to a disk that is no more
			cfg.FS = m
			c = open(t, cfg)
			if now, _ := m.took(); now > cfg.Limit {
				t.Fatalf("seed %d, cut %d: the files take %d bytes", seed, cut, now)
			}
			found := readAll(t, c, all)
			sum = tally{sum.right + found.right, sum.wrong + found.wrong, sum.missing + found.missing}
			if again := readAll(t, c, all); again.wrong != 0 || again.right != found.right {
				t.Fatalf("seed %d, cut %d: first %+v, then %+v", seed, cut, found, again)
			}
			if cut >= 1 {
				pins += len(c.Pinned()) // synced before the cut
			}
		}
		work(t, c, all, rnd)
		closed(t, c)
		c = open(t, cfg)
		if found := readAll(t, c, all); found.wrong != 0 {
			t.Fatalf("seed %d: %d chunks written after the cuts are wrong after a good restart", seed, found.wrong)
		}
		closed(t, c)
	}
	t.Logf("after %d power cuts: %d chunks read right, %d wrong and dropped, %d missing", 4*cutSeeds, sum.right, sum.wrong, sum.missing)
	if sum.right == 0 || sum.wrong == 0 || sum.missing == 0 || evicted == 0 {
		t.Errorf("%+v: a power cut that costs nothing, or all, shows nothing", sum)
	}
	if pins != cutSeeds*3 {
		t.Errorf("%d of %d times the pinned image was pinned after the cut", pins, cutSeeds*3)
	}
}

// work writes some chunks and reads others.
func work(t *testing.T, c *cache.Cache, all []named, rnd *rand.Rand) {
	t.Helper()
	buf := make([]byte, chunk.MaxSize)
	for range 250 {
		n := all[rnd.IntN(len(all))]
		switch rnd.IntN(4) {
		case 0:
			c.OfferSpeculative(n.Digest, n.p)
		case 1:
			p := buf[:len(n.p)]
			if c.ReadAt(n.Digest, p, 0) == nil && !bytes.Equal(p, n.p) {
				c.Drop(n.Digest)
			}
		case 2:
			put(t, c, n)
		default:
			c.Offer(n.Digest, n.p)
		}
	}
}

// The environment that makes this test program the one that is killed.
const killedDir = "QUARRY_TEST_CACHE_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(killedDir); dir != "" {
		if err := beKilled(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// The chunks of the process that is killed: 300 of up to 200 kB, 30 MB, which its
// limit has room for, and as many again where something must be evicted.
const (
	killedChunks = 600
	kills        = 10
)

func killedChunk(i int) named { return name(content(i, 1+i*7919%200_000)) }

// beKilled writes chunks for ever, and says of each that it was written.
func beKilled(dir string) error {
	c, err := cache.Open(cache.Config{Dir: dir, Limit: 48 << 20})
	if err != nil {
		return err
	}
	if len(c.Pinned()) == 0 {
		var mine []cache.Chunk
		for i := range 50 {
			mine = append(mine, list([]named{killedChunk(i)})...)
		}
		if err := c.Pin(chunk.Digest{1}, mine); err != nil {
			return err
		}
	}
	fmt.Println("open")
	rnd := rand.New(rand.NewPCG(uint64(os.Getpid()), 0))
	for {
		i := rnd.IntN(killedChunks)
		n := killedChunk(i)
		p := make([]byte, len(n.p))
		switch err := c.ReadAt(n.Digest, p, 0); {
		case errors.Is(err, store.ErrNotFound):
		case err != nil:
			return err
		case chunk.Sum(p) != n.Digest:
			return fmt.Errorf("chunk %d: wrong bytes after a kill", i)
		}
		for range 3 { // some of them are in the queue when the end comes
			o := killedChunk(rnd.IntN(killedChunks))
			c.OfferSpeculative(o.Digest, o.p)
		}
		if err := c.Put(context.Background(), n.Digest, n.p); err != nil {
			return err
		}
		fmt.Println(i)
	}
}

// TestKilled kills a process that writes with SIGKILL: whatever it said it had
// written and had no reason to evict is there with the right bytes, whatever else
// is there has the right bytes too.
func TestKilled(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	rnd := rand.New(rand.NewPCG(2, 2))
	pinnedThere := map[int]bool{}
	written := 0
	for range kills {
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), killedDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(out)
		if line, _ := r.ReadString('\n'); line != "open\n" {
			cmd.Process.Kill()
			cmd.Wait()
			t.Fatalf("the program says %q: %s", line, stderr.String())
		}
		kill := time.AfterFunc(time.Duration(5+rnd.IntN(150))*time.Millisecond, func() { cmd.Process.Kill() })
		said, _ := io.ReadAll(r)
		cmd.Wait()
		kill.Stop()
		if stderr.Len() > 0 {
			t.Fatalf("the program says: %s", stderr.String())
		}
		lines := strings.Split(string(said), "\n")
		for _, line := range lines[:len(lines)-1] { // the last one may be cut
			i, err := strconv.Atoi(line)
			if err != nil {
				t.Fatal(err)
			}
			written++
			if i < 50 {
				pinnedThere[i] = true
			}
		}
		afterKill(t, dir, pinnedThere)
	}
	t.Logf("killed %d times, %d chunks written between", kills, written)
	if len(pinnedThere) == 0 {
		t.Error("no pinned chunk was written: nothing was shown")
	}
}

// afterKill checks the folder that a killed process left.
func afterKill(t *testing.T, dir string, pinnedThere map[int]bool) {
	t.Helper()
	c := open(t, cache.Config{Dir: dir, Limit: 48 << 20})
	defer c.Close()
	if size := folderSize(t, dir); size > 48<<20 {
		t.Errorf("the folder has %d bytes", size)
	}
	for i := range killedChunks {
		if n := killedChunk(i); !has(t, c, n) && pinnedThere[i] {
			t.Errorf("pinned chunk %d was written, and is gone", i)
		}
	}
	if len(c.Pinned()) != 1 {
		t.Error("the pin is gone")
	}
}
