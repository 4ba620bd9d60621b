package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"quarry/worker/sandbox"
)

// record is what the next worker has to know of a sandbox's network. It is written
// before what it says is done, so that nothing is ever made that no record names; it
// is not synced, since nothing of a network outlives the kernel.
type record struct {
	ID         string         `json:"id"`
	Slot       string         `json:"slot"`
	Gateway    netip.Addr     `json:"gateway,omitzero"`
	Policy     sandbox.Policy `json:"policy"`
	Generation int64          `json:"generation"`
	Revision   int64          `json:"revision"`
	Names      []recordName   `json:"names,omitempty"`
}

type recordName struct {
	pair
	At time.Time `json:"at"`
}

const (
	recordSuffix = ".json"
	maxRecord    = 4 << 20
	maxID        = 64
)

// validID reports whether an id can be the name of a file.
func validID(id string) bool {
	if id == "" || len(id) > maxID {
		return false
	}
	return strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && id[0] != '-'
}

func (n *Network) recordPath(id string) string {
	return filepath.Join(n.cfg.Folder, "sandboxes", id+recordSuffix)
}

func (n *Network) writeRecord(r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := n.recordPath(r.ID)
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// readRecord returns sandbox.ErrUnknown when there is none.
func (n *Network) readRecord(id string) (record, error) {
	f, err := os.Open(n.recordPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, fmt.Errorf("%w: %s has no network", sandbox.ErrUnknown, id)
	}
	if err != nil {
		return record{}, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(b, &r); err != nil || r.ID != id {
		return record{}, fmt.Errorf("the record of the network of %s: %w", id, errors.Join(err, sandbox.ErrUnknown))
	}
	return r, nil
}

// records lists the ids that have one, or the beginning of one.
func (n *Network) records() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(n.cfg.Folder, "sandboxes"))
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(strings.TrimSuffix(e.Name(), ".new"), recordSuffix); ok && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
