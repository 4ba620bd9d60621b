package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// connect makes a connection through p: what a client and a server hold of it.
func connect(p *Proxy) (client, server net.Conn) {
	client, near := net.Pipe()
	far, server := net.Pipe()
	go p.serve(near, far) // ends when both ends are closed
	return client, server
}

// arrival reads n bytes and returns how long after start they were there.
func arrival(t *testing.T, start time.Time, c net.Conn, n int) time.Duration {
	t.Helper()
	if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

// In a synctest bubble time passes only while everything waits, so that these
// are counts of round trips and bits, not measurements.
func TestDelayIsOnceForWhatIsSentTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProxy(Config{RTT: 50 * time.Millisecond})
		client, server := connect(p)
		defer server.Close()
		defer client.Close()
		start := time.Now()
		go func() {
			for range 3 {
				client.Write([]byte("ask"))
				time.Sleep(10 * time.Millisecond)
			}
		}()
		var got []time.Duration
		for range 3 {
			got = append(got, arrival(t, start, server, 3))
		}
		// The handshake's 50 ms and 25 ms of the way; then what came meanwhile.
		want := []time.Duration{75 * time.Millisecond, 75 * time.Millisecond, 75 * time.Millisecond}
		if !slices.Equal(got, want) {
			t.Errorf("requests arrive at %v, want %v", got, want)
		}
		start = time.Now()
		go func() {
			server.Write([]byte("one"))
			time.Sleep(10 * time.Millisecond)
			server.Write([]byte("two"))
		}()
		got = []time.Duration{arrival(t, start, client, 3), arrival(t, start, client, 3)}
		if want := []time.Duration{25 * time.Millisecond, 35 * time.Millisecond}; !slices.Equal(got, want) {
			t.Errorf("answers arrive at %v, want %v: the delay must not add up", got, want)
		}
	})
}

func TestConnectionsShareTheBandwidth(t *testing.T) {
	for conns, want := range map[int]time.Duration{1: time.Second, 4: 4 * time.Second} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const each = 1 << 20
				p := newProxy(Config{BitsPerSecond: 8 * each})
				start := time.Now()
				var wg sync.WaitGroup
				for range conns {
					client, server := connect(p)
					defer client.Close()
					defer server.Close()
					go server.Write(make([]byte, each))
					wg.Go(func() { arrival(t, start, client, each) })
				}
				wg.Wait()
				if got := time.Since(start); got < want || got > want+time.Millisecond {
					t.Errorf("%d connections of 1 MiB took %v at 1 MiB/s, want %v", conns, got, want)
				}
				if p.Bytes() != int64(conns)*each {
					t.Errorf("counted %d bytes, want %d", p.Bytes(), conns*each)
				}
			})
		})
	}
}

func TestStalledBytesComeWhenMended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProxy(Config{})
		client, server := connect(p)
		defer server.Close()
		defer client.Close()
		p.Stall()
		start := time.Now()
		go server.Write([]byte("late"))
		time.AfterFunc(time.Hour, p.Mend)
		if got := arrival(t, start, client, 4); got < time.Hour {
			t.Errorf("a stalled answer came after %v", got)
		}
	})
}

func TestFlippedBitIsInLongPiecesOfTheServerOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProxy(Config{})
		client, server := connect(p)
		defer server.Close()
		defer client.Close()
		p.Flip(100)
		for _, tc := range []struct {
			name     string
			from, to net.Conn
			n, bits  int
		}{
			{"short answer", server, client, 99, 0},
			{"long answer", server, client, 100, 1},
			{"long request", client, server, 100, 0},
		} {
			sent, got := bytes.Repeat([]byte{0x55}, tc.n), make([]byte, tc.n)
			go tc.from.Write(bytes.Clone(sent))
			if _, err := io.ReadFull(tc.to, got); err != nil {
				t.Fatal(err)
			}
			differ := 0
			for i := range got {
				if got[i] != sent[i] {
					differ++
				}
			}
			if differ != tc.bits {
				t.Errorf("%s: %d bytes differ, want %d", tc.name, differ, tc.bits)
			}
		}
	})
}

func TestCutConnectionsAreClosedAndNewOnesToo(t *testing.T) {
	target, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	go func() { // ends with the listener
		for {
			c, err := target.Accept()
			if err != nil {
				return
			}
			go io.Copy(c, c) // ends with the connection
		}
	}()
	p, err := New(Config{Target: target.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	echo := func() error {
		c, err := net.Dial("tcp", p.Addr())
		if err != nil {
			return err
		}
		defer c.Close()
		c.Write([]byte("x"))
		_, err = io.ReadFull(c, make([]byte, 1))
		return err
	}
	if err := echo(); err != nil {
		t.Fatalf("before Cut: %v", err)
	}
	held, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	held.Write([]byte("x"))
	if _, err := io.ReadFull(held, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	p.Cut()
	if _, err := io.ReadFull(held, make([]byte, 1)); err == nil {
		t.Error("the connection lives after Cut")
	}
	if err := echo(); err == nil {
		t.Error("a new connection lives after Cut")
	}
	p.Mend()
	if err := echo(); err != nil {
		t.Errorf("after Mend: %v", err)
	}
	if p.Conns() != 4 {
		t.Errorf("counted %d connections, want 4", p.Conns())
	}
}
