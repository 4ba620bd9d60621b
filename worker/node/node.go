package node

import (
	"context"
	"errors"
	"io"

	"quarry/worker/sandbox"
)

// ErrRunning says that another node has the folder.
var ErrRunning = errors.New("another node runs on this worker folder")

// Node keeps the sandboxes of one worker folder.
type Node struct{}

func (n *Node) Create(ctx context.Context, s sandbox.Spec, key string) (sandbox.Sandbox, bool, error) {
	return sandbox.Sandbox{}, false, sandbox.ErrUnsupported
}
func (n *Node) Get(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, sandbox.ErrUnknown
}
func (n *Node) List(ctx context.Context, f sandbox.Filter) ([]sandbox.Sandbox, string, error) {
	return nil, "", nil
}
func (n *Node) Delete(ctx context.Context, id string) (sandbox.End, error) {
	return sandbox.End{}, sandbox.ErrUnknown
}
func (n *Node) Authorize(ctx context.Context, id, token string) bool { return false }
func (n *Node) Pause(ctx context.Context, id string) error           { return sandbox.ErrUnknown }
func (n *Node) Resume(ctx context.Context, id string) error          { return sandbox.ErrUnknown }
func (n *Node) SetTTL(ctx context.Context, id string, seconds int64) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, sandbox.ErrUnknown
}
func (n *Node) Usage(ctx context.Context, id string) (sandbox.Usage, error) {
	return sandbox.Usage{}, sandbox.ErrUnknown
}
func (n *Node) Exec(ctx context.Context, id string, e sandbox.ExecSpec) (sandbox.ExecState, error) {
	return sandbox.ExecState{}, sandbox.ErrUnknown
}
func (n *Node) WaitExec(ctx context.Context, id, exec string, out, err int64) (sandbox.ExecState, error) {
	return sandbox.ExecState{}, sandbox.ErrUnknown
}
func (n *Node) Execs(ctx context.Context, id string) ([]sandbox.ExecState, error) {
	return nil, sandbox.ErrUnknown
}
func (n *Node) Output(ctx context.Context, id, exec, stream string, offset int64, w io.Writer) (int64, error) {
	return 0, sandbox.ErrUnknown
}
func (n *Node) Stdin(ctx context.Context, id, exec string, offset int64, r io.Reader, end bool) (int64, error) {
	return 0, sandbox.ErrUnknown
}
func (n *Node) Signal(ctx context.Context, id, exec string, signal int) error {
	return sandbox.ErrUnknown
}
func (n *Node) Resize(ctx context.Context, id, exec string, w sandbox.Window) error {
	return sandbox.ErrUnknown
}
func (n *Node) ReadFile(ctx context.Context, id, path string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	return sandbox.ErrUnknown
}
func (n *Node) WriteFile(ctx context.Context, id, path string, o sandbox.WriteOptions, r io.Reader) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{}, sandbox.ErrUnknown
}
func (n *Node) StatFile(ctx context.Context, id, path string) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{}, sandbox.ErrUnknown
}
func (n *Node) ListFiles(ctx context.Context, id, path string, depth int) ([]sandbox.FileInfo, error) {
	return nil, sandbox.ErrUnknown
}
func (n *Node) RemoveFile(ctx context.Context, id, path string) error { return sandbox.ErrUnknown }
func (n *Node) TarDown(ctx context.Context, id string, o sandbox.TarOptions, w io.Writer) error {
	return sandbox.ErrUnknown
}
func (n *Node) TarUp(ctx context.Context, id, path string, r io.Reader) error {
	return sandbox.ErrUnknown
}
func (n *Node) Give(ctx context.Context, id string, s sandbox.Share) error { return sandbox.ErrUnknown }
func (n *Node) Take(ctx context.Context, id, target string) error          { return sandbox.ErrUnknown }
func (n *Node) SetNetwork(ctx context.Context, id string, p sandbox.Policy) (sandbox.Network, error) {
	return sandbox.Network{}, sandbox.ErrUnknown
}
func (n *Node) Events(ctx context.Context, after uint64, id string, fn func(sandbox.Event) error) error {
	<-ctx.Done()
	return ctx.Err()
}
func (n *Node) Status(ctx context.Context) (sandbox.NodeStatus, error) {
	return sandbox.NodeStatus{}, nil
}
func (n *Node) Drain(ctx context.Context, end bool) error { return nil }
