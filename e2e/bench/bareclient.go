package main

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// clientBuffer is what one read of a connection may bring: enough that reading
	// costs little beside serving.
	clientBuffer = 256 << 10
	// exchangeTimeout ends a measurement of a server that does not answer.
	exchangeTimeout = 2 * time.Minute
)

// bareClient asks over one HTTP/1.1 connection and throws bodies away at the least
// cost there is, so that it is the servers that are compared.
type bareClient struct {
	conn net.Conn
	r    *bufio.Reader
}

func newBareClient(conn net.Conn) *bareClient {
	return &bareClient{conn: conn, r: bufio.NewReaderSize(conn, clientBuffer)}
}

// exchange sends a request and reads an answer, whose body must have size bytes.
func (c *bareClient) exchange(request []byte, size int64) error {
	if err := c.conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		return err
	}
	if _, err := c.conn.Write(request); err != nil {
		return err
	}
	status, length, err := c.head()
	if err != nil {
		return err
	}
	if status != http.StatusOK && status != http.StatusPartialContent {
		return fmt.Errorf("status %d", status)
	}
	if length < 0 {
		if length, err = c.chunked(); err != nil {
			return err
		}
	} else if err := c.discard(length); err != nil {
		return err
	}
	if length != size {
		return fmt.Errorf("a body of %d bytes, want %d", length, size)
	}
	return nil
}

// head reads the status line and the headers; length is -1 for a chunked body.
func (c *bareClient) head() (status int, length int64, err error) {
	line, err := c.line()
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscanf(line, "HTTP/1.1 %d", &status); err != nil {
		return 0, 0, fmt.Errorf("status line %q: %w", line, err)
	}
	length = -1
	for {
		line, err := c.line()
		if err != nil || line == "" {
			return status, length, err
		}
		if name, value, _ := strings.Cut(line, ":"); strings.EqualFold(name, "Content-Length") {
			if length, err = strconv.ParseInt(strings.TrimSpace(value), 10, 64); err != nil {
				return 0, 0, err
			}
		}
	}
}

// chunked reads a chunked body with its trailers and returns its length.
func (c *bareClient) chunked() (total int64, err error) {
	for {
		line, err := c.line()
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(line, 16, 64)
		if err != nil {
			return 0, err
		}
		if n == 0 {
			break
		}
		if err := c.discard(n + 2); err != nil { // and the line's end
			return 0, err
		}
		total += n
	}
	for {
		if line, err := c.line(); err != nil || line == "" {
			return total, err
		}
	}
}

func (c *bareClient) line() (string, error) {
	line, err := c.r.ReadSlice('\n')
	return strings.TrimRight(string(line), "\r\n"), err
}

func (c *bareClient) discard(n int64) error {
	_, err := c.r.Discard(int(n))
	return err
}
