package e2e_test

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"
)

// inSandbox prints the sum of every file, or says that it cannot, several at a
// time: each waits in vain for as long as a read may. The program itself is read
// before, so that it can say so.
const inSandbox = `cat /bin/busybox >/dev/null
for k in 0 1 2 3 4 5 6 7 8 9 10 11; do
	for f in $(seq $k 12 23); do
		f=$(printf /tree/f%02d $f); sha256sum $f || echo failed $f
	done &
done
wait`

func (c *cell) underRunsc() (string, error) {
	during, err := c.runStruck(c.strike, c.soon)
	if err != nil || during == wrong {
		return during, err
	}
	if err := c.mended(); err != nil {
		return "", err
	}
	switch again, err := c.runStruck(func(*cell) error { return nil }, false); {
	case err != nil || again != right:
		return again, fmt.Errorf("run after the fault: %s, %w", again, err)
	}
	return during, nil
}

// runStruck runs readers of the tree under runsc and strikes while they read; soon
// has that mended while they wait.
func (c *cell) runStruck(strike func(*cell) error, soon bool) (string, error) {
	args := append(append([]string{"run"}, c.flags()...), matrixImage, "sh", "-c", inSandbox)
	cmd := c.Command(c.ctx, args...)
	cmd.Stderr = &c.log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	stop := func() bool { return false }
	var mended chan error
	sums := map[string]string{}
	lines, n := bufio.NewReader(out), 0
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			if err != io.EOF {
				return "", err
			}
			break
		}
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  /"); ok {
			sums[name] = sum
		}
		if n++; n == strikeAfter {
			if err := strike(c); err != nil {
				return "", err
			}
			if soon {
				mended = make(chan error, 1)
				stop = time.AfterFunc(patience, func() { mended <- c.mended() }).Stop
			}
		}
	}
	waited := mended != nil && !stop()
	if waited {
		if err := <-mended; err != nil {
			return "", err
		}
	}
	err = cmd.Wait()
	fmt.Fprintf(&c.log, "run: %v, %d of %d files\n", err, len(sums), len(c.tree))
	for name, sum := range sums {
		if c.tree[name] != sum {
			return wrong, nil
		}
	}
	switch code := cmd.ProcessState.ExitCode(); {
	case code == 125:
		return failed, nil
	case code != 0:
		return "", fmt.Errorf("run ended with %d", code)
	case len(sums) < len(c.tree):
		return eio, nil
	case waited:
		return waits, nil
	}
	return right, nil
}
