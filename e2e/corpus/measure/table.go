package measure

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Print writes the report as tables. Sizes are in MB, 10^6 bytes; what stands in
// parentheses is how many times smaller than the raw bytes it is.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "MB\timages\tlayers\tfiles\traw\tgzip\tlayer-dedup\tdiffID-dedup\tfile-dedup\t")
	for _, g := range r.Groups {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t\n", g.Name, g.Images, g.Layers, g.Files, mb(g.RawBytes), mb(g.GzipBytes),
			mb(g.LayerBytes), mb(g.DiffIDBytes), times(g.FileBytes, g.RawBytes))
	}
	for _, g := range r.Groups {
		fmt.Fprintf(t, "\n%s\tchunks\tchunk-dedup\tchunk+zstd\tpacks\tindex\tB/chunk\tbootstraps\tzstd\tof image\t\n", g.Name)
		for _, row := range g.Fixed {
			fmt.Fprintf(t, "S = %s\t%d\t%s\t%s\t%s\t%.2f\t%.1f\t%.2f\t%.2f\t%.2f %%\t\n", kib(row.Size), row.Chunks, times(row.PlainBytes, g.RawBytes),
				times(row.StoredBytes, g.RawBytes), mb(row.PackBytes), float64(row.IndexBytes)/1e6, per(row.IndexBytes, row.Chunks),
				float64(row.BootstrapBytes)/1e6, float64(row.BootstrapZstd)/1e6, 100*per(row.BootstrapZstd, g.ImageBytes))
		}
		for _, row := range g.CDC {
			fmt.Fprintf(t, "CDC %s\t%d\t%s\t%s\t%s\t%.2f\t%.1f\t\t\t\t\n", kib(row.Size), row.Chunks, times(row.PlainBytes, g.RawBytes),
				times(row.StoredBytes, g.RawBytes), mb(row.PackBytes), float64(row.IndexBytes)/1e6, per(row.IndexBytes, row.Chunks))
		}
	}
	if len(r.Cold) > 0 {
		r.printCold(t)
	}
	return t.Flush()
}

// printCold has plain and stored bytes and the number of chunks at each size.
func (r *Report) printCold(t io.Writer) {
	fmt.Fprint(t, "\ncold commands, MB plain/stored, chunks\tfiles\tpages\t")
	for _, s := range r.Sizes {
		fmt.Fprintf(t, "S = %s\t", kib(s))
	}
	fmt.Fprintln(t)
	total := ColdStart{Image: "all", Fixed: make([]Fetched, len(r.Sizes))}
	for _, c := range r.Cold {
		c.print(t)
		total.Files += c.Files
		total.Pages += c.Pages
		for i, f := range c.Fixed {
			total.Fixed[i].Chunks += f.Chunks
			total.Fixed[i].PlainBytes += f.PlainBytes
			total.Fixed[i].StoredBytes += f.StoredBytes
		}
	}
	total.print(t)
	fmt.Fprint(t, "plain and stored bytes ÷ page bytes\t\t\t")
	for _, f := range total.Fixed {
		fmt.Fprintf(t, "%.2f/%.2f\t", per(f.PlainBytes, total.Pages), per(f.StoredBytes, total.Pages))
	}
	fmt.Fprintln(t)
}

func (c ColdStart) print(t io.Writer) {
	const width = 40 // of a command; the JSON has all of it
	command := strings.Join(strings.Fields(strings.Join(c.Command, " ")), " ")
	if len(command) > width {
		command = command[:width-1] + "…"
	}
	fmt.Fprintf(t, "%s: %s\t%d\t%.2f\t", c.Image, command, c.Files, float64(c.Pages)/1e6)
	for _, f := range c.Fixed {
		fmt.Fprintf(t, "%.1f/%.1f %d\t", float64(f.PlainBytes)/1e6, float64(f.StoredBytes)/1e6, f.Chunks)
	}
	fmt.Fprintln(t)
}

func mb(n int64) string { return fmt.Sprintf("%.1f", float64(n)/1e6) }

func times(n, raw int64) string { return fmt.Sprintf("%s (%.2f)", mb(n), per(raw, n)) }

func per(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

func kib(n int64) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
