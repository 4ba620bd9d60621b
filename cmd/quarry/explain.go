package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"quarry/nbd/attach"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

func newExplain() *cobra.Command {
	var w workerFlags
	var asJSON bool
	c := &cobra.Command{
		Use:   "explain [IMAGE|RUN|FILE.json]",
		Short: "say where the time and the bytes of a run or of a mounted image went",
		Long: `explain shows of a run where each millisecond went and each byte came from, which reads
failed and why, and which took longest, with the files they are of. Without an argument it is
the last run on this worker; RUN names another one of the last 64, FILE.json is what run
--stats wrote. Of IMAGE, a name that was used here or an image id, it shows the same since the
image was opened, as far as it is mounted; it asks no store.`,
		Args: rangeArgs(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			return runExplain(c.Context(), w, args, asJSON, c.OutOrStdout())
		},
	}
	w.dirFlag(c)
	c.Flags().StringVar(&w.platform, "platform", "", "OS/ARCH[/VARIANT] of the image; default is this machine's")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// explainVersion is the version of what explain --json prints.
const explainVersion = 1

// explained is what explain --json prints: a run or an image.
type explained struct {
	Version int             `json:"version"`
	Run     *explainedRun   `json:"run,omitempty"`
	Image   *explainedImage `json:"image,omitempty"`
}

// explainedRun is a run: its --stats file, and what follows from it.
type explainedRun struct {
	Name string `json:"name,omitempty"` // "" for a file
	worker.Record
	UnnamedMillis float64 `json:"in_no_step_ms"` // of duration_ms
}

// explainedImage is what a mounted image cost since the reader opened it.
type explainedImage struct {
	ID     chunk.Digest     `json:"image_id"`
	Mounts []explainedMount `json:"mounts"`
	// Reader is what the reader counts; Unknown says why that is not there, or not
	// since the mount.
	Reader  *reader.Stats `json:"reader,omitempty"`
	Unknown string        `json:"reader_figures_unknown,omitempty"`
	NoDisk  string        `json:"disk_cache_missing,omitempty"` // why the reader has none
}

// explainedMount is one mount of an image, as its shim tells of it.
type explainedMount struct {
	Root    string          `json:"root"`
	Device  string          `json:"device"`
	Attach  string          `json:"attach"`
	PID     int             `json:"pid"`
	Serving bool            `json:"serving"` // the shim lives
	Began   time.Time       `json:"began,omitzero"`
	Steps   []timeline.Step `json:"steps"`
	// What the shim has counted since then.
	FailedReads uint64 `json:"failed_reads"`    // answered with EIO
	NewReaders  uint64 `json:"new_connections"` // to a reader, after the first
	end         time.Time
}

func runExplain(ctx context.Context, w workerFlags, args []string, asJSON bool, stdout io.Writer) error {
	d, err := folder.Open(w.dir)
	if err != nil {
		return err
	}
	doc := explained{Version: explainVersion}
	switch {
	case len(args) == 0:
		names, err := worker.Records(d)
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return fmt.Errorf("no run is remembered in %s: name an image or a --stats file", d.Path())
		}
		doc.Run, err = explainRun(d, names[len(names)-1])
		if err != nil {
			return err
		}
	case worker.IsRecordName(args[0]):
		if doc.Run, err = explainRun(d, args[0]); err != nil {
			return err
		}
	case strings.HasSuffix(args[0], ".json"):
		r, err := worker.ReadRecordFile(args[0])
		if err != nil {
			return err
		}
		doc.Run = newExplainedRun("", r)
	default:
		if doc.Image, err = explainImage(ctx, d, w, args[0]); err != nil {
			return err
		}
	}
	if asJSON {
		text, err := json.MarshalIndent(doc, "", "  ")
		if err == nil {
			_, err = stdout.Write(append(printableJSON(text), '\n'))
		}
		return err
	}
	t := &report{}
	if doc.Run != nil {
		t.run(doc.Run)
	} else {
		t.image(doc.Image)
	}
	_, err = io.WriteString(stdout, t.b.String())
	return err
}

func explainRun(d folder.Dir, name string) (*explainedRun, error) {
	r, err := worker.ReadRecord(d, name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("run %s: not one of the last that %s remembers", name, d.Path())
	}
	if err != nil {
		return nil, err
	}
	return newExplainedRun(name, r), nil
}

func newExplainedRun(name string, r worker.Record) *explainedRun {
	r = r.WithLists()
	left := r.DurationMillis - timeline.Covered(r.Steps, r.DurationMillis)
	return &explainedRun{Name: name, Record: r, UnnamedMillis: max(0, left)}
}

// imageOnWorker finds an image of the worker folder by its id or by a name that
// was used here.
func imageOnWorker(d folder.Dir, w workerFlags, name string) (chunk.Digest, error) {
	id, err := chunk.Parse(name)
	if err != nil {
		id, err = chunk.ParseHex(name)
	}
	if err == nil {
		if !d.Has(id) {
			return id, fmt.Errorf("image id %s: %w", id, folder.ErrUnknown)
		}
		return id, nil
	}
	ref, platform, err := w.wanted(name)
	if err != nil {
		return id, err
	}
	return d.Known(ref, platform)
}

func explainImage(ctx context.Context, d folder.Dir, w workerFlags, name string) (*explainedImage, error) {
	id, err := imageOnWorker(d, w, name)
	if err != nil {
		return nil, err
	}
	e := &explainedImage{ID: id, Mounts: []explainedMount{}}
	for _, dir := range []string{d.MountDir(id), d.NoACLDir(id)} {
		m, err := explainMount(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		e.Mounts = append(e.Mounts, m)
	}
	st, err := reader.ImageStats(ctx, d, id)
	switch {
	case errors.Is(err, reader.ErrNotOpen):
		e.Unknown = "no reader has the image open"
	case err != nil:
		e.Unknown = err.Error()
	default:
		st = st.WithLists()
		e.Reader = &st
		e.Unknown = sinceWhen(e.Mounts, st)
		if c, err := reader.DiskCache(ctx, d); err == nil {
			e.NoDisk = c.Missing
		}
	}
	if len(e.Mounts) == 0 && e.Reader == nil {
		return nil, fmt.Errorf("image %s is not mounted on this worker; quarry explain without an argument tells of the last run", id)
	}
	return e, nil
}

// sinceWhen says that the figures do not go back to a mount's begin: its reader
// was replaced since, and what the one before counted is gone.
func sinceWhen(mounts []explainedMount, st reader.Stats) string {
	for _, m := range mounts {
		if !m.end.IsZero() && st.Opened.After(m.end) {
			return fmt.Sprintf("the reader was replaced since the image was mounted: these figures begin %s after that",
				st.Opened.Sub(m.end).Round(time.Millisecond))
		}
	}
	return ""
}

func explainMount(dir string) (explainedMount, error) {
	st, err := attach.ReadState(dir)
	if err != nil {
		return explainedMount{}, err
	}
	m := explainedMount{
		Root: filepath.Join(dir, "root"), Device: st.Device, Attach: string(st.Attach), PID: st.PID, Serving: st.Alive(), Steps: []timeline.Step{},
	}
	if counts, err := attach.ReadCounts(dir); err == nil {
		m.FailedReads, m.NewReaders = counts.FailedReads, counts.Readers
	}
	if len(st.Steps) == 0 {
		return m, nil
	}
	m.Began = st.Steps[0].Began
	t := timeline.New(m.Began)
	for _, s := range st.Steps {
		t.Add(s.Name, s.Began, s.Ended)
		if s.Ended.After(m.end) {
			m.end = s.Ended
		}
	}
	m.Steps = t.Steps()
	return m, nil
}
