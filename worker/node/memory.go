package node

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"quarry/worker/holder"
	"quarry/worker/memory"
)

// PausedMemory says what becomes of the memory of sandboxes that are paused.
type PausedMemory string

const (
	PausedKeep      PausedMemory = "keep"      // it stays
	PausedReclaim   PausedMemory = "reclaim"   // it is taken when others need it, in the end to disk, and brought back before the sandbox runs on
	PausedHibernate PausedMemory = "hibernate" // it goes to disk with every pause, and the Sentry ends
)

// pausedMemories are those that a node takes.
var pausedMemories = []PausedMemory{PausedReclaim, PausedKeep, PausedHibernate}

// PausedMemories names them, for usage texts.
func PausedMemories() string {
	names := make([]string, len(pausedMemories))
	for i, m := range pausedMemories {
		names[i] = string(m)
	}
	return strings.Join(names, ", ")
}

// ParsePausedMemory reads one of the names; "" is PausedReclaim.
func ParsePausedMemory(text string) (PausedMemory, error) {
	if text == "" {
		return PausedReclaim, nil
	}
	if m := PausedMemory(text); slices.Contains(pausedMemories, m) {
		return m, nil
	}
	return "", fmt.Errorf("memory of paused sandboxes %q: unknown, want one of %s", text, PausedMemories())
}

const (
	// wakePatience is how long a resume waits for memory that was taken. A sandbox is to
	// run within 50 ms of the first packet of its model's answer, and the Resume of a
	// Sentry whose own memory is in a swap file takes 7 to 20 ms of them.
	wakePatience = 30 * time.Millisecond
	// memoryPatience bounds the question for a guest's memory file: a Sentry is not
	// trusted to answer at all.
	memoryPatience = time.Second
	// watchPause is how soon the machine's memory is read again that could not be.
	watchPause = 10 * time.Second
)

// boxMemory is how a sandbox's memory is taken and brought back.
type boxMemory struct {
	mu    sync.Mutex // guards what follows
	over  bool       // the sandbox ends: nothing is opened or added any more
	group *memory.Group
	file  *memory.File // of the guest
}

// reducer has the Sentry of a holder drop what it can do without.
type reducer struct{ h *holder.Client }

// Reduce implements memory.Reducer; the holder waits in any case.
func (r reducer) Reduce(ctx context.Context, _ bool) error { return r.h.Reduce(ctx) }

// journalOfReclaim names what of the sandbox's group is set otherwise while memory is
// taken, see worker/memory.
func (b *box) journalOfReclaim() string { return filepath.Join(b.dir, "reclaim") }

// mendMemory opens the group of a sandbox, and sets back what a node that was killed
// has left of a reclaim.
func (b *box) mendMemory() {
	if b.group == nil {
		return
	}
	m := &b.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over || m.group != nil {
		return
	}
	g, err := memory.OpenGroup(memory.GroupConfig{Dir: b.group.MemoryDir(), Journal: b.journalOfReclaim()})
	if err != nil {
		b.n.log.Warn("the memory of a sandbox is not taken when it waits", "sandbox", b.id, "err", err)
		return
	}
	m.group = g
}

// readyMemory opens what its memory is taken and brought back by, before it is paused:
// afterwards its model's answer may be there at any moment.
func (b *box) readyMemory() {
	if b.n.c.PausedMemory == PausedKeep || b.group == nil {
		return
	}
	b.mendMemory()
	m := &b.memory
	m.mu.Lock()
	ready := m.over || m.file != nil
	m.mu.Unlock()
	if ready {
		return
	}
	f, err := b.openMemory()
	if err != nil {
		b.n.log.Warn("the memory of a sandbox comes back only when it is touched", "sandbox", b.id, "err", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over || m.file != nil {
		f.Close()
		return
	}
	m.file = f
}

func (b *box) openMemory() (*memory.File, error) {
	ctx, cancel := context.WithTimeout(context.Background(), memoryPatience)
	defer cancel()
	given, err := b.h.MemoryFile(ctx)
	if err != nil {
		return nil, err
	}
	defer given.Close()
	return memory.OpenMemory(given)
}

// offerMemory says that the sandbox is paused, so that its memory may be taken. before
// says that this may have begun under an earlier node.
func (b *box) offerMemory(before bool) {
	now, until := time.Now(), time.Time{}
	if b.expected > 0 {
		until = now.Add(b.expected)
	}
	m := &b.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.n.c.PausedMemory == PausedKeep || m.over || m.group == nil {
		return
	}
	b.n.waiting.Add(memory.Sandbox{
		ID: b.id, Group: m.group, Memory: m.file, Sentry: reducer{b.h}, Images: b.imagesInUse, Processes: b.members, Away: before,
	}, now, until)
}

// imagesInUse opens the files of the image that the sandbox has used.
func (b *box) imagesInUse(ctx context.Context) []*memory.File {
	b.mu.Lock()
	mt := b.mount
	b.mu.Unlock()
	if mt == nil {
		return nil
	}
	pids, err := b.members()
	if err != nil {
		return nil
	}
	files, err := memory.OpenImages(ctx, pids, mt.Root())
	if err != nil {
		b.n.log.Warn("pages of an image come back only when they are read", "sandbox", b.id, "err", err)
	}
	return files
}

// bringBack brings the sandbox's memory back, as far as there is time.
func (b *box) bringBack() {
	ctx, cancel := context.WithTimeout(context.Background(), wakePatience)
	defer cancel()
	got, err := b.n.waiting.Wake(ctx, b.id)
	switch {
	case err != nil:
		b.n.log.Warn("memory of a sandbox comes back only when it is touched", "sandbox", b.id, "err", err)
	case got.Bytes > 0 || got.Rest:
		b.n.log.Debug("memory of a sandbox is back", "sandbox", b.id, "bytes", got.Bytes, "mapped_64k", got.Mapped, "took", got.Took, "rest", got.Rest)
	}
}

// leaveMemory lets its memory go, before it ends: a memory file that is open keeps all
// that is in it.
func (b *box) leaveMemory() {
	b.memory.mu.Lock()
	b.memory.over = true
	b.memory.mu.Unlock()
	b.forgetMemory()
	b.n.waiting.Forget(b.id)
}

// memorySources are what may have too little memory: the machine, and the groups that
// the sandboxes are in.
func (n *Node) memorySources() []memory.Source {
	sources := []memory.Source{memory.Machine{}}
	if n.tree != nil {
		sources = append(sources, memory.Above(n.tree.MemoryDir())...)
	}
	return sources
}

// watchMemory takes memory of paused sandboxes while others need it, until the node is
// closed.
func (n *Node) watchMemory() {
	marks := memory.Marks{Low: n.c.MemoryLow, High: n.c.MemoryHigh}
	for {
		err := memory.Watch(n.life, n.memorySources(), marks, n.c.MemoryMetrics, func(want int64) {
			for _, took := range n.waiting.Reclaim(n.life, want) {
				if want -= took.Bytes(); took.Err != nil {
					n.log.Warn("memory of a paused sandbox is not taken", "sandbox", took.ID, "err", took.Err)
				}
			}
			if want > 0 {
				n.napForRoom()
			}
		})
		if n.life.Err() != nil {
			return
		}
		n.log.Warn("the memory of the machine is not watched", "err", err, "again_in", watchPause)
		select {
		case <-n.life.Done():
			return
		case <-time.After(watchPause):
		}
	}
}

// memoryLimits says what this machine cannot do with the memory of paused sandboxes.
func (n *Node) memoryLimits() []string {
	if n.c.PausedMemory == PausedKeep {
		return nil
	}
	if n.tree == nil {
		return []string{"There are no control groups: a sandbox that waits keeps its memory."}
	}
	r, err := memory.Machine{}.Read()
	if err != nil {
		return []string{"A sandbox that waits keeps its memory: " + err.Error()}
	}
	return memory.Limits(n.tree.MemoryDir(), r)
}
