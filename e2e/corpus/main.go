// Command corpus builds the corpus of real images and measures on it what chunk
// sizes, deduplication and metadata cost. make corpus and make corpus-report run
// it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"quarry/e2e/corpus/build"
	"quarry/e2e/corpus/measure"
	"quarry/e2e/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "corpus:", err)
		os.Exit(1)
	}
}

const usage = `usage: corpus build  --dir DIR --debs DIR [--jobs N] [IMAGE…]
       corpus report --dir DIR [--json FILE] [--cold=false] [IMAGE…]
       corpus list`

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no command\n%s", usage)
	}
	switch args[0] {
	case "list":
		for _, r := range build.List() {
			fmt.Println(r.Name())
		}
		return nil
	case "build":
		return again(ctx, args[1:])
	case "report":
		return runReport(ctx, args[1:])
	case buildInside:
		if err := leaveImages(); err != nil {
			return err
		}
		return runBuild(ctx, args[1:])
	}
	return fmt.Errorf("no command %q\n%s", args[0], usage)
}

// buildInside is build in the process that again starts.
const buildInside = "build-inside"

// again runs this program in a mount namespace of its own, so that whatever
// ends it unmounts and removes all that it mounted.
func again(ctx context.Context, args []string) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{buildInside}, args...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	if err := cmd.Run(); err != nil {
		if errors.As(err, new(*exec.ExitError)) {
			return errors.New("the build failed; what is above says why")
		}
		return fmt.Errorf("start the build: %w (it needs root)", err)
	}
	return nil
}

func runBuild(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("build", flag.ContinueOnError)
	cfg := build.Config{Log: os.Stdout}
	flags.StringVar(&cfg.Dir, "dir", "", "folder of the corpus, an absolute path")
	flags.StringVar(&cfg.Debs, "debs", "", "folder of package archives, an absolute path")
	flags.IntVar(&cfg.Jobs, "jobs", 2, "images built at once")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var err error
	if cfg.Recipes, err = chosen(flags.Args()); err != nil {
		return err
	}
	return build.Run(ctx, cfg)
}

// chosen returns the recipes of the images named, or all.
func chosen(names []string) ([]build.Recipe, error) {
	all := build.List()
	if len(names) == 0 {
		return all, nil
	}
	var rs []build.Recipe
	for _, name := range names {
		i := slices.IndexFunc(all, func(r build.Recipe) bool { return r.Name() == name })
		if i < 0 {
			return nil, fmt.Errorf("no image %q in the corpus; corpus list has their names", name)
		}
		rs = append(rs, all[i])
	}
	return rs, nil
}

// sizes are the chunk sizes to choose from.
func sizes() []int64 { return []int64{64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20} }

func runReport(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("report", flag.ContinueOnError)
	dir := flags.String("dir", "", "folder of the corpus")
	jsonFile := flags.String("json", "", "also write the report as JSON to this file")
	cold := flags.Bool("cold", true, "run the cold commands; needs root and the built programs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	recipes, err := chosen(flags.Args())
	if err != nil {
		return err
	}
	cfg := measure.Config{Sizes: sizes()}
	for _, r := range recipes {
		cfg.Images = append(cfg.Images, measure.Image{Name: r.Name(), Family: r.Family, Layout: filepath.Join(*dir, r.Name())})
	}
	if *cold {
		l, err := lab.New()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, l.Close()) }()
		cfg.Commands, cfg.Trace = coldCommands(), (&tracer{l}).trace
	}
	c, err := measure.Read(ctx, cfg)
	if err != nil {
		return err
	}
	r, err := c.Report(ctx)
	if err != nil {
		return err
	}
	if *jsonFile != "" {
		raw, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(*jsonFile, append(raw, '\n'), 0o644); err != nil {
			return err
		}
	}
	return r.Print(os.Stdout)
}
