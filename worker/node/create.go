package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/worker"
	"quarry/worker/cgroup"
	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// Create implements sandbox.Node. The create goes on when ctx ends: the sandbox is
// listed from when it was admitted, and its key finds it.
func (n *Node) Create(ctx context.Context, s sandbox.Spec, key string) (sb sandbox.Sandbox, made bool, err error) {
	body, err := bodyDigest(s)
	if err != nil {
		return sb, false, err
	}
	if len(key) > maxKey {
		return sb, false, invalid("idempotency key: %d bytes, at most %d", len(key), maxKey)
	}
	b, known, err := n.admit(s, key, keyed{body: body})
	for err == nil && known.id != "" {
		sb, made, failed := n.existing(ctx, known)
		if !errors.Is(failed, errLost) {
			return sb, made, failed
		}
		// An earlier node did not live to make it. Its end has freed the key.
		b, known, err = n.admit(s, key, keyed{body: body})
	}
	if err != nil {
		return sb, false, err
	}
	if err := wait(ctx, b.settled); err != nil {
		return sb, false, err
	}
	return n.answer(b, true)
}

// existing answers a create whose key is known. With errLost, what there was of the
// sandbox has ended.
func (n *Node) existing(ctx context.Context, k keyed) (sandbox.Sandbox, bool, error) {
	b, err := n.box(k.id)
	var ended *sandbox.EndedError
	if errors.As(err, &ended) {
		n.mu.Lock()
		failed := n.ended[k.id].Failed
		n.mu.Unlock()
		if failed { // just now
			return sandbox.Sandbox{}, false, errLost
		}
		sb, err := n.Get(ctx, k.id)
		sb.Token = n.token(k.id)
		return sb, false, err
	}
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if err := wait(ctx, b.settled); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if errors.Is(b.failed(), errLost) {
		if err := wait(ctx, b.over); err != nil {
			return sandbox.Sandbox{}, false, err
		}
	}
	return n.answer(b, false)
}

func (n *Node) answer(b *box, made bool) (sandbox.Sandbox, bool, error) {
	if err := b.failed(); err != nil {
		return sandbox.Sandbox{}, false, fmt.Errorf("sandbox %s: %w", b.id, err)
	}
	sb, err := n.Get(context.Background(), b.id)
	sb.Token = n.token(b.id)
	return sb, made, err
}

// admit makes a box, or finds the one that the key made.
func (n *Node) admit(s sandbox.Spec, key string, k keyed) (*box, keyed, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if have, ok := n.keys[key]; ok && key != "" {
		if have.body != k.body {
			return nil, k, fmt.Errorf("%w: %q, of sandbox %s: give another sandbox another key", sandbox.ErrKeyConflict, key, have.id)
		}
		return nil, have, nil
	}
	if n.closed || n.draining {
		n.ledger.refuse("draining")
		return nil, k, fmt.Errorf("%w: ask another node, or start its worker anew", sandbox.ErrDraining)
	}
	if n.noCreate != nil {
		return nil, k, n.noCreate
	}
	full, err := n.checked(s)
	if err != nil {
		return nil, k, err
	}
	if err := n.hasRoom(amountOf(full)); err != nil {
		return nil, k, err
	}
	if err := n.ledger.take(amountOf(full), n.c.QueuedCreates); err != nil {
		return nil, k, err
	}
	now := n.now()
	j := journal{
		Version: journalVersion, ID: newID(), Boot: n.boot, Phase: phaseCreating, Key: key, Body: k.body, Asked: full,
		Created: now.UTC().Round(0), Policy: full.Network, Timings: map[string]int64{},
	}
	b := n.newBox(j)
	if full.TTL > 0 {
		b.expires = now.Add(time.Duration(full.TTL) * time.Second)
		at := b.expires.UTC().Round(0)
		b.j.Expires = &at
	}
	n.boxes[b.id] = b
	if key != "" {
		k.id = b.id
		n.keys[key] = k
	}
	b.tell("creating")
	n.work.Go(func() { b.own(true) })
	return b, keyed{}, nil
}

func newID() string { return strings.ToLower(rand.Text()[:idLength]) }

// createError is why a create failed, as its record has it.
type createError struct {
	cause cause
	err   error
}

func (e *createError) Error() string { return e.err.Error() }
func (e *createError) Unwrap() error { return e.err }

// create makes the sandbox. What it has made when it fails is taken apart by finish.
func (b *box) create() {
	defer b.n.ledger.leave()
	ctx, cancel := context.WithTimeout(context.Background(), b.n.c.CreateTimeout)
	defer cancel()
	// Who asks for the end of a sandbox that is being made does not wait for the make.
	go func() { // ends with ctx
		select {
		case <-b.ask:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := b.make(ctx)
	if err == nil {
		return
	}
	low := b.n.diskLow()
	c := causeOf(err, low)
	b.end(c)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failure = inContract(err, low)
	if b.cause.Reason != c.Reason || b.cause.Message != c.Message { // deleted meanwhile
		b.failure = fmt.Errorf("%w: %s", sandbox.ErrEnded, b.cause.Message)
	}
	b.state = sandbox.StateEnding
}

// byDisk reports whether a create may have failed for want of room on a disk that is
// low: runsc, the holder and the reader say so in words alone.
func byDisk(err error, low string) bool {
	return isFull(err) || low != "" && (!typed(err) || errors.Is(err, sandbox.ErrRuntime) || errors.Is(err, sandbox.ErrImagePull))
}

// inContract makes a create's error one of those that callers know. low says that the
// node's disk has hardly any room.
func inContract(err error, low string) error {
	switch {
	case byDisk(err, low):
		return fmt.Errorf("%w: %w", busyDisk(cmp.Or(low, "the disk of the worker's folder is full")), err)
	case typed(err):
		return err
	case errors.Is(err, worker.ErrPlatform):
		return fmt.Errorf("%w: %w", sandbox.ErrUnsupported, err)
	}
	return fmt.Errorf("%w: %w", sandbox.ErrRuntime, err)
}

// step times a part of the create, in microseconds.
func (b *box) step(name string) (done func()) {
	began := time.Now()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		t := maps.Clone(b.j.Timings) // callers may hold the one before
		t[name] = time.Since(began).Microseconds()
		b.j.Timings = t
	}
}

func (b *box) make(ctx context.Context) error {
	defer b.step("total")()
	for _, dir := range []string{"", "upper", "runsc"} {
		if err := os.Mkdir(filepath.Join(b.dir, dir), 0o700); err != nil {
			return err
		}
	}
	if err := b.update(func(*journal) {}); err != nil {
		return err
	}
	fetched := b.step("image")
	im, err := b.fetch(ctx)
	fetched()
	if err != nil {
		return err
	}
	waited := b.step("queue")
	done, err := b.n.ledger.turn(ctx)
	waited()
	if err != nil {
		return err
	}
	defer done()
	if err := b.gather(ctx, im); err != nil {
		return err
	}
	if err := b.start(ctx, im.Image); err != nil {
		return err
	}
	return b.began()
}

// fetch has the image, or leaves that behind when ctx ends: what a store has begun to
// send is for the next sandbox as well.
func (b *box) fetch(ctx context.Context) (Fetched, error) {
	type had struct {
		im  Fetched
		err error
	}
	done := make(chan had, 1)
	go func() { // ends with the answers of the store, which Fetch bounds
		im, err := b.n.c.Fetch(ctx, b.j.Asked.Image)
		done <- had{im, err}
	}()
	select {
	case h := <-done:
		return h.im, h.err
	case <-ctx.Done():
		return Fetched{}, context.Cause(ctx)
	}
}

// gather makes what the sandbox stands on: the image's mount, its network, its group.
func (b *box) gather(ctx context.Context, im Fetched) error {
	b.mu.Lock()
	asked := b.j.Asked
	b.mu.Unlock()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer b.step("mount")()
		graded := asked.Role == sandbox.RoleGrade
		mt, err := b.n.c.Worker.AcquireForSandbox(gctx, im.Image, graded)
		if err != nil {
			return err
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.mount = mt
		b.j.Ref, b.j.ImageID, b.j.ImageDigest = mt.Ref(), im.ID, im.Statement.Source
		if b.j.Served, err = mt.Served(); err != nil {
			return fmt.Errorf("mount of the image: %w", err)
		}
		if !graded {
			b.n.readAhead(mt, b.j.Served, im)
		}
		return nil
	})
	if b.n.c.Network != nil {
		g.Go(func() error {
			defer b.step("network")()
			l, err := b.n.c.Network.Take(gctx, b.id, asked.Network)
			if err != nil {
				if errors.Is(err, sandbox.ErrInvalid) {
					return err // what was asked for cannot be
				}
				return &createError{cause{Reason: sandbox.ReasonNetwork, Message: "its network policy could not be put in force: " + err.Error()}, err}
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.link, b.j.Generation = l, l.State().Generation
			return nil
		})
	}
	if b.n.tree != nil {
		g.Go(func() error {
			defer b.step("cgroup")()
			_, err := b.n.tree.Make(b.id, cgroup.Limits{Memory: asked.MemoryMB << 20, PIDs: hostPIDs(asked.PIDs), CPUMilli: asked.CPUMilli})
			return err
		})
	}
	return g.Wait()
}

// began writes down that the sandbox runs.
func (b *box) began() error {
	if err := b.update(func(j *journal) { j.Phase = phaseRunning }); err != nil {
		return err
	}
	b.mu.Lock()
	b.state, b.used = sandbox.StateRunning, b.n.now()
	b.mu.Unlock()
	b.watchModel()
	b.watchIdle()
	return nil
}

// causeOf says which end a create's error is.
func causeOf(err error, low string) cause {
	var ce *createError
	if errors.As(err, &ce) {
		return ce.cause
	}
	c := cause{Reason: sandbox.ReasonCreateFailed, Message: err.Error()}
	user := []error{
		sandbox.ErrInvalid, sandbox.ErrShare, sandbox.ErrFilePath, sandbox.ErrFileType, sandbox.ErrFileExists, sandbox.ErrTooLarge, sandbox.ErrUnsupported, worker.ErrCommandNotFound, worker.ErrNotExecutable, worker.ErrPlatform,
	}
	switch {
	case errors.Is(err, sandbox.ErrImageVerify):
		c.Reason = sandbox.ReasonVerify
	case errors.Is(err, sandbox.ErrImage):
		c.Reason, c.Blame = sandbox.ReasonImage, sandbox.BlameUser
	case byDisk(err, low):
		c.Reason = sandbox.ReasonDiskFull
	case errors.Is(err, sandbox.ErrImagePending), errors.Is(err, sandbox.ErrImagePull):
		c.Reason = sandbox.ReasonImage
	case errors.Is(err, network.ErrForward):
		c.Reason = sandbox.ReasonNetwork
	case slices.ContainsFunc(user, func(e error) bool { return errors.Is(err, e) }):
		c.Blame = sandbox.BlameUser
	}
	return c
}
