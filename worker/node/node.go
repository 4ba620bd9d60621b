package node

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"quarry/internal/durable"
	"quarry/internal/proc"
	"quarry/internal/strictjson"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/cgroup"
	"quarry/worker/memory"
	modelwait "quarry/worker/network/wait"
	"quarry/worker/sandbox"
)

// ErrRunning says that another node has the folder.
var ErrRunning = errors.New("another quarry worker runs on this folder: stop it, or give another --worker-dir")

var _ sandbox.Node = (*Node)(nil)

// Node keeps the sandboxes of one worker folder.
type Node struct {
	c        Config
	log      *slog.Logger
	lock     *proc.Lock
	identity identity
	boot     string
	tree     *cgroup.Tree // nil where control groups cannot be used
	cannot   []string     // what this machine lacks
	noCreate error        // why no sandbox can be made
	runsc    string       // its version
	events   *events
	ledger   *ledger
	records  records
	waits    *modelwait.Watcher // nil without endpoints of models
	waiting  memory.Waiting     // paused sandboxes whose memory may be taken
	ahead    ahead
	naps     chan struct{} // has an element while a sandbox is being put to disk
	wakes    chan struct{} // the same while one is restored from a disk that is low

	mu       sync.Mutex // guards lastFull and unmarked
	boxes    map[string]*box
	ended    map[string]record
	keys     map[string]keyed
	draining bool
	closed   bool

	fullMu   sync.Mutex // guards lastFull and unmarked
	lastFull time.Time  // when the disk was seen full; zero is never
	unmarked bool       // the mark of that is not as it should be

	left chan struct{}  // has an element when a sandbox has left its mount
	work sync.WaitGroup // the goroutines of boxes and the janitor
	stop context.CancelFunc
	life context.Context // ends with Close; nothing that a sandbox needs hangs on it
}

// keyed is the sandbox that an idempotency key made.
type keyed struct {
	id   string
	body chunk.Digest
}

// identity is node.json in the worker folder.
type identity struct {
	Version int    `json:"version"`
	Secret  string `json:"secret"` // hex; of the tokens of sandboxes
	Epoch   uint64 `json:"epoch"`  // how often a node has begun
}

const (
	identityVersion = 1
	secretBytes     = 32
)

// Paths in the worker folder.
func (c Config) boxesDir() string     { return filepath.Join(c.Dir.Path(), "node") }
func (c Config) recordsDir() string   { return filepath.Join(c.Dir.Path(), "records") }
func (c Config) identityPath() string { return filepath.Join(c.Dir.Path(), "node.json") }
func (c Config) lockPath() string     { return filepath.Join(c.Dir.Path(), "node.lock") }
func (c Config) fullPath() string     { return filepath.Join(c.Dir.Path(), "node.full") }

// New opens the worker folder's node: it takes node.lock, checks runsc, and adopts or
// ends every sandbox that an earlier node has left, which it waits for. Errors:
// ErrRunning.
func New(ctx context.Context, c Config) (*Node, error) {
	for _, dir := range []string{c.boxesDir(), c.recordsDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	l, err := proc.TakeFree(ctx, c.lockPath())
	if errors.Is(err, proc.ErrLocked) {
		return nil, fmt.Errorf("%w: %s", ErrRunning, c.Dir.Path())
	}
	if err != nil {
		return nil, err
	}
	n, err := open(ctx, c, l)
	if err != nil {
		l.Unlock()
		return nil, err
	}
	return n, nil
}

func open(ctx context.Context, c Config, l *proc.Lock) (*Node, error) {
	c, err := c.withDefaults(c.boxesDir())
	if err != nil {
		return nil, err
	}
	n := &Node{
		c: c, log: c.Log, lock: l, records: records{c.recordsDir()},
		boxes: map[string]*box{}, ended: map[string]record{}, keys: map[string]keyed{},
		ahead: ahead{turns: make(chan struct{}, aheadAtOnce), mounts: map[string]worker.Served{}},
		left:  make(chan struct{}, 1), naps: make(chan struct{}, 1), wakes: make(chan struct{}, 1),
	}
	if n.log == nil {
		n.log = slog.New(slog.DiscardHandler)
	}
	if err := l.Sign(); err != nil {
		n.log.WarnContext(ctx, "the node's lock does not name it", "err", err)
	}
	if n.boot, err = bootID(); err != nil {
		return nil, err
	}
	if err := n.begin(); err != nil {
		return nil, err
	}
	n.events = newEvents(n.identity.Epoch)
	n.waiting.Metrics = c.MemoryMetrics
	n.ledger = newLedger(c.gives(), c.Creates)
	n.life, n.stop = context.WithCancel(context.WithoutCancel(ctx))
	if err := n.beginWaits(ctx); err != nil {
		n.stop()
		return nil, err
	}
	n.look(ctx)
	if err := n.records.keepReserve(); err != nil {
		n.log.WarnContext(ctx, "nothing is reserved for records on a full disk", "err", err)
	}
	if err := n.loadRecords(ctx); err != nil {
		n.closeWaits()
		return nil, err
	}
	if err := n.recallFull(); err != nil {
		n.log.WarnContext(ctx, "whether the disk was full before is not known", "err", err)
	}
	n.lookAtDisk() // what is adopted has to know
	if err := n.adoptAll(ctx); err != nil {
		n.stop()
		n.closeWaits()
		n.work.Wait()
		return nil, err
	}
	n.work.Go(n.janitor)
	n.work.Go(n.watchImages)
	n.work.Go(n.watchDisk)
	n.work.Go(n.watchAnswers)
	if n.c.PausedMemory != PausedKeep {
		n.work.Go(n.watchMemory)
	}
	if n.waits != nil {
		n.work.Go(n.followEndpoints)
	}
	return n, nil
}

// begin reads who the node is, and counts that it begins once more: see eventEpoch.
func (n *Node) begin() error {
	raw, err := readBounded(n.c.identityPath())
	id := identity{Version: identityVersion}
	if err == nil {
		if id, err = decodeIdentity(raw); err != nil {
			err = fmt.Errorf("%s: %w", n.c.identityPath(), err)
		}
	} else if errors.Is(err, fs.ErrNotExist) {
		secret := make([]byte, secretBytes)
		rand.Read(secret)
		id.Secret, err = hex.EncodeToString(secret), nil
	}
	if err != nil {
		return err
	}
	id.Epoch++
	if raw, err = json.Marshal(id); err != nil {
		return err
	}
	n.identity = id
	err = durable.WriteFile(n.c.identityPath(), raw, 0o600)
	if isFull(err) && id.Epoch > 1 {
		return overwrite(n.c.identityPath(), raw)
	}
	if isFull(err) {
		return fmt.Errorf("the disk has no room for a new worker folder: free some of it: %w", err)
	}
	return err
}

func decodeIdentity(raw []byte) (identity, error) {
	id, err := strictjson.Decode[identity](raw, maxJournal)
	if err != nil {
		return identity{}, err
	}
	if id.Version != identityVersion {
		return identity{}, fmt.Errorf("version %d, this program knows %d", id.Version, identityVersion)
	}
	if b, err := hex.DecodeString(id.Secret); err != nil || len(b) != secretBytes {
		return identity{}, fmt.Errorf("the secret is not %d bytes in hex", secretBytes)
	}
	return id, nil
}

// token is a sandbox's own: whoever has it may use that sandbox alone. It follows from
// the id and the node's secret, so that a create that is asked for again tells it again.
func (n *Node) token(id string) string {
	m := hmac.New(sha256.New, []byte(n.identity.Secret))
	m.Write([]byte("quarry sandbox token " + id))
	return sandbox.TokenPrefix + id + "_" + base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// Authorize implements sandbox.Node.
func (n *Node) Authorize(_ context.Context, id, token string) bool {
	n.mu.Lock()
	_, live := n.boxes[id]
	_, over := n.ended[id]
	n.mu.Unlock()
	return hmac.Equal([]byte(token), []byte(n.token(id))) && (live || over)
}

// all returns the sandboxes that there are.
func (n *Node) all() []*box {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Values(n.boxes))
}

func (n *Node) now() time.Time { return n.c.Now() }

// Close lets the folder go and leaves the sandboxes running, for the next node. It
// waits for creates under way to settle and for ends under way.
func (n *Node) Close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.stop()
	n.closeWaits() // nobody would see their answers
	n.work.Wait()
	defer n.lock.Unlock()
	n.mu.Lock()
	left := len(n.boxes)
	for _, b := range n.boxes {
		b.leaveMemory() // what was taken the next node brings back
	}
	n.mu.Unlock()
	if n.tree == nil || left > 0 {
		return nil
	}
	return n.tree.Remove()
}

// unknown is for an id that no sandbox and no record has.
func unknown(id string) error {
	return fmt.Errorf("%w: %q: it is of another worker, or ended so long ago that its record is gone", sandbox.ErrUnknown, id)
}

// box finds a sandbox that has not ended. Errors: sandbox.ErrUnknown,
// *sandbox.EndedError.
func (n *Node) box(id string) (*box, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r, ok := n.ended[id]; ok {
		return nil, &sandbox.EndedError{ID: id, End: *r.Sandbox.End}
	}
	if b, ok := n.boxes[id]; ok {
		return b, nil
	}
	return nil, unknown(id)
}
