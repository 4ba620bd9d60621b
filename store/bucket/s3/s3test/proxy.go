package s3test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// Fault is what a Proxy does with one request.
type Fault string

const (
	None              Fault = ""
	SlowDown          Fault = "503 SlowDown instead of the request"
	Reset             Fault = "connection reset instead of the request"
	ResetApplied      Fault = "connection reset instead of the answer"
	FailApplied       Fault = "500 instead of the answer"
	ErrorIn200        Fault = "200 with an error instead of the request"
	ErrorIn200Applied Fault = "200 with an error instead of the answer"
	Truncate          Fault = "half of the answer's body"
	Empty             Fault = "200 without a body or header instead of the answer"
	Stall             Fault = "no answer"
	StallBody         Fault = "half of the answer's body, and no end"
	NotFound          Fault = "404 instead of the answer"
	Unconditional     Fault = "the request without If-None-Match"
	OneKey            Fault = "the request with one key a page"
	RepeatPage        Fault = "the first page again"
	NoList            Fault = "an empty listing"
)

// Transient are the faults that any request may have once.
var Transient = []Fault{SlowDown, Reset, ResetApplied, FailApplied, ErrorIn200, ErrorIn200Applied, Truncate, Empty, Stall, StallBody}

// Ops are the names that Op gives.
var Ops = []string{"PutObject", "CreateUpload", "UploadPart", "CompleteUpload", "HeadObject", "GetObject", "ListObjects", "DeleteObject"}

// Op returns the operation that a request is.
func Op(r *http.Request) string {
	query := r.URL.Query()
	upload := query.Has("uploadId")
	switch _, key, _ := strings.Cut(strings.Trim(r.URL.Path, "/"), "/"); {
	case r.Method == "GET" && query.Has("list-type"):
		return "ListObjects"
	case key == "":
		return "Bucket"
	case r.Method == "PUT" && upload:
		return "UploadPart"
	case r.Method == "PUT":
		return "PutObject"
	case r.Method == "POST" && query.Has("uploads"):
		return "CreateUpload"
	case r.Method == "POST" && upload:
		return "CompleteUpload"
	case r.Method == "DELETE" && upload:
		return "AbortUpload"
	case r.Method == "DELETE":
		return "DeleteObject"
	case r.Method == "HEAD":
		return "HeadObject"
	}
	return "GetObject"
}

// Proxy stands between clients and a Server, and does to requests what its rule
// says.
type Proxy struct {
	URL    string
	target *url.URL
	client *http.Client

	mu   sync.Mutex // guards what follows
	rule func(*http.Request) Fault
	seen map[string]int
}

// NewProxy starts a proxy before the endpoint; it ends with the test.
func NewProxy(t testing.TB, endpoint string) *Proxy {
	t.Helper()
	p, end, err := StartProxy(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(end)
	return p
}

// StartProxy is NewProxy for callers that have no test; they call end.
func StartProxy(endpoint string) (p *Proxy, end func(), err error) {
	target, err := url.Parse(endpoint)
	if err != nil {
		return nil, nil, err
	}
	p = &Proxy{target: target, seen: map[string]int{}, client: &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}}}
	srv := httptest.NewServer(p)
	p.URL = srv.URL
	return p, func() { srv.CloseClientConnections(); srv.Close() }, nil
}

// Every returns a rule under which every n-th request has one of the faults, in
// turn.
func Every(n int, faults ...Fault) func(*http.Request) Fault {
	var count atomic.Int64
	return func(*http.Request) Fault {
		k := int(count.Add(1))
		if k%n != 0 {
			return None
		}
		return faults[k/n%len(faults)]
	}
}

// Rule makes rule decide about all further requests; nil has no faults.
func (p *Proxy) Rule(rule func(*http.Request) Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rule, p.seen = rule, map[string]int{}
}

// Seen returns how many requests of an operation came since the rule was set.
func (p *Proxy) Seen(op string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen[op]
}

// First returns a rule under which the first n requests of the operation have the
// fault.
func First(n int, op string, f Fault) func(*http.Request) Fault {
	var mu sync.Mutex
	return func(r *http.Request) Fault {
		mu.Lock()
		defer mu.Unlock()
		if Op(r) != op || n == 0 {
			return None
		}
		n--
		return f
	}
}

// Always returns a rule under which all requests of the operation have the fault.
func Always(op string, f Fault) func(*http.Request) Fault { return First(-1, op, f) }

func (p *Proxy) decide(r *http.Request) Fault {
	p.mu.Lock()
	rule := p.rule
	p.seen[Op(r)]++
	p.mu.Unlock()
	if rule == nil {
		return None
	}
	return rule(r)
}

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	fault := p.decide(r)
	switch fault {
	case SlowDown:
		answer(w, http.StatusServiceUnavailable, "SlowDown")
		return
	case ErrorIn200:
		io.Copy(io.Discard, r.Body)
		answer(w, http.StatusOK, "InternalError")
		return
	case Reset:
		reset(w)
		return
	case Stall:
		io.Copy(io.Discard, r.Body) // the server sees only then that the client has gone
		<-r.Context().Done()
		return
	}
	resp, body, err := p.forward(r, fault)
	if err != nil {
		reset(w)
		return
	}
	p.reply(w, r, fault, resp, body)
}

// reply passes on what the server said, or spoils it.
func (p *Proxy) reply(w http.ResponseWriter, r *http.Request, fault Fault, resp *http.Response, body []byte) {
	switch fault {
	case ResetApplied:
		reset(w)
		return
	case FailApplied:
		answer(w, http.StatusInternalServerError, "InternalError")
		return
	case ErrorIn200Applied:
		answer(w, http.StatusOK, "InternalError")
		return
	case NotFound:
		w.WriteHeader(http.StatusNotFound)
		return
	case Empty:
		w.WriteHeader(http.StatusOK)
		return
	case NoList:
		body = emptied(body)
		resp.Header.Del("Content-Length")
	}
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(resp.StatusCode)
	if fault != Truncate && fault != StallBody {
		w.Write(body)
		return
	}
	w.Write(body[:len(body)/2])
	http.NewResponseController(w).Flush()
	if fault == StallBody && len(body) > 0 {
		<-r.Context().Done()
	}
	reset(w)
}

// emptied returns the answer of a listing without its objects.
func emptied(body []byte) []byte {
	from, to := bytes.Index(body, []byte("<Contents>")), bytes.LastIndex(body, []byte("</Contents>"))
	if from < 0 {
		return body
	}
	return append(bytes.Clone(body[:from]), body[to+len("</Contents>"):]...)
}

// forward makes the request of the server, signed again, because what it is
// changed by was signed.
func (p *Proxy) forward(r *http.Request, fault Fault) (*http.Response, []byte, error) {
	out := r.Clone(context.WithoutCancel(r.Context())) // what was sent is applied, whether the client waits or not
	out.RequestURI, out.Host = "", p.target.Host
	out.URL.Scheme, out.URL.Host = p.target.Scheme, p.target.Host
	for _, name := range []string{"Authorization", "Expect", "Connection"} {
		out.Header.Del(name)
	}
	query := out.URL.Query()
	switch fault {
	case Unconditional:
		out.Header.Del("If-None-Match")
	case OneKey:
		query.Set("max-keys", "1")
	case RepeatPage:
		query.Set("max-keys", "1")
		query.Del("continuation-token")
	}
	out.URL.RawQuery = query.Encode()
	creds := aws.Credentials{AccessKeyID: accessKey, SecretAccessKey: Secret}
	hash := r.Header.Get("X-Amz-Content-Sha256")
	err := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true }).SignHTTP(out.Context(), creds, out, hash, "s3", region, time.Now())
	if err != nil {
		return nil, nil, err
	}
	resp, err := p.client.Do(out)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp, body, err
}

// answer is S3's way to say that something went wrong.
func answer(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>made up by a test</Message></Error>", code)
}

// reset cuts the connection as a peer that crashed does.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	conn.Close()
}
