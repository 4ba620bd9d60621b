package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"quarry/e2e/lab"
	"quarry/e2e/lab/proxy"
	"quarry/store/trace"
)

const (
	// gateRTT is the distance at which cold starts are judged.
	gateRTT = 5 * time.Millisecond
	// startRounds: what takes a second or two is disturbed more than what takes ten.
	startRounds = 5
)

// command is what is started cold.
type command struct {
	name  string
	args  []string
	gated bool
}

var startCommands = []command{
	{"pip --version", []string{"pip", "--version"}, true},
	{wireCommand, wireArgs, false},
	{"python3 -c 'import numpy'", []string{"python3", "-c", "import numpy"}, false},
	{"git status", []string{"git", "-C", "/src", "status", "--short"}, false},
	{"pytest --collect-only", []string{"pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--pyargs", "numpy.polynomial", "numpy.fft", "numpy.linalg"}, false},
}

// arm is what the store knows when a command starts cold.
type arm struct {
	name     string
	image    string
	flags    []string
	ratio    float64 // limits of a gated command: time against the local folder,
	requests float64 // requests,
	fetch    float64 // and stored bytes fetched against those of touched chunks; 0 is none
}

var (
	without = arm{name: "without a trace", image: coldImage, flags: []string{"--no-trace"}, ratio: 3, requests: 150, fetch: 2.2}
	with    = arm{name: "with a trace", image: coldImage, ratio: 1.3, requests: 10, fetch: 1.1}
	sibling = arm{name: "sibling's trace", image: siblingImage, ratio: 1.6}
)

const (
	coldImage    = "bench/cold"
	siblingImage = "bench/sibling" // and the number of its start: each has another image
)

// cold is what the cold starts share.
type cold struct {
	b      *bench
	lab    *lab.Lab
	full   string // data folder with the images, of which no run is known
	data   string // that of server
	server *lab.Server
	layout layout
	second string // OCI layout of the sibling
	root   string // the image, unpacked
	rtts   []time.Duration
	count  int // of folders
}

// measureStart starts commands on workers that have never seen the image, at
// several distances from the store, and beside it in a local folder.
func measureStart(ctx context.Context, b *bench) (err error) {
	c, err := b.coldStore(ctx)
	if err != nil {
		return err
	}
	commands := startCommands[:2]
	c.rtts = []time.Duration{gateRTT}
	if b.all {
		commands, c.rtts = startCommands, []time.Duration{0, gateRTT, 50 * time.Millisecond}
	}
	if err := c.prepareStarts(ctx); err != nil {
		return err
	}
	fmt.Printf("     %-26s %6s %-16s %8s %8s %9s %8s %9s %8s %6s\n",
		"cold start, 1 Gbit/s", "RTT", "", "time", "÷ local", "requests", "wire MB", "plain MB", "pages MB", "fetch×")
	for _, cmd := range commands {
		if err := c.serving(ctx, func() error { return c.start(ctx, cmd) }); err != nil {
			return fmt.Errorf("%s: %w", cmd.name, err)
		}
	}
	return nil
}

// serving calls fn while a store serves the images that knows of no run: what one
// command touches is not what another does.
func (c *cold) serving(ctx context.Context, fn func() error) (err error) {
	c.count++
	c.data = c.lab.Path(fmt.Sprintf("store%d", c.count))
	if out, err := exec.CommandContext(ctx, "cp", "-a", "--reflink=auto", c.full, c.data).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the store: %w: %s", err, out)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(c.data)) }()
	if c.server, err = c.lab.Serve(ctx, c.data); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.server.Stop()) }()
	return fn()
}

// coldStore converts the image, once.
func (b *bench) coldStore(ctx context.Context) (*cold, error) {
	if b.cold != nil {
		return b.cold, nil
	}
	first, second, err := lab.ColdImages()
	if err != nil {
		return nil, err
	}
	c := &cold{b: b, lab: b.lab, full: b.lab.Path("start"), root: b.lab.Path("root"), second: second}
	if c.layout, err = readLayout(first); err != nil {
		return nil, err
	}
	if _, err := c.lab.Convert(ctx, c.full, "oci:"+first, coldImage); err != nil {
		return nil, err
	}
	if err := c.lab.StopOwner(c.full); err != nil {
		return nil, err
	}
	b.cold = c
	return c, nil
}

// prepareStarts converts the image's siblings, and unpacks the image.
func (c *cold) prepareStarts(ctx context.Context) error {
	for i := range startRounds * len(c.rtts) {
		if err := c.convertSibling(ctx, c.second, i); err != nil {
			return err
		}
	}
	if err := errors.Join(c.lab.StopOwner(c.full), os.Mkdir(c.root, 0o755)); err != nil {
		return err
	}
	for _, layer := range c.layout.layers {
		if out, err := exec.CommandContext(ctx, "tar", "-C", c.root, "-xzpf", layer).CombinedOutput(); err != nil {
			return fmt.Errorf("unpack %s: %w: %s", layer, err, out)
		}
	}
	return nil
}

func siblingName(i int) string { return fmt.Sprintf("%s%d", siblingImage, i) }

// convertSibling converts the independent build as an image of its own, which a
// label makes it: one that has run is no longer a sibling that has not.
func (c *cold) convertSibling(ctx context.Context, layout string, i int) (err error) {
	dir := c.lab.Path("sibling")
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, args := range [][]string{
		{"cp", "-a", layout, dir},
		{"umoci", "config", "--image", dir + ":latest", "--config.label", fmt.Sprintf("start=%d", i)},
	} {
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	_, err = c.lab.Convert(ctx, c.full, "oci:"+dir, siblingName(i))
	return err
}

// worker is the folder of a worker that has never seen anything, with the flags
// that lead it to a store.
func (c *cold) worker(url string) (dir string, flags []string) {
	c.count++
	dir = c.lab.Path(fmt.Sprintf("w%d", c.count))
	return dir, []string{"--store", url, "--trust", c.data + "/keys/signing.pub", "--worker-dir", dir}
}

// leave ends what works in a worker folder, and removes it.
func (c *cold) leave(dir string) error {
	return errors.Join(c.lab.EndBelow(dir), os.RemoveAll(dir))
}

// start measures one command at every distance.
func (c *cold) start(ctx context.Context, cmd command) error {
	here, err := c.localRuns(ctx, cmd)
	if err != nil {
		return err
	}
	touch := map[string]touched{}
	for image, name := range map[string]string{coldImage: coldImage, siblingImage: siblingName(0)} {
		if touch[image], err = c.touch(ctx, name, cmd); err != nil {
			return err
		}
	}
	if err := c.recordRuns(ctx, cmd); err != nil {
		return err
	}
	for i, rtt := range c.rtts {
		if err := c.at(ctx, cmd, rtt, i*startRounds, here, touch); err != nil {
			return err
		}
	}
	return nil
}

// localRuns returns how the command runs in a local folder, which has run it
// before: its pages are in memory.
func (c *cold) localRuns(ctx context.Context, cmd command) (*lab.Recipe, error) {
	dir, flags := c.worker(c.server.URL)
	recipe, err := c.lab.Recipe(ctx, append(flags, "--no-trace"), coldImage, cmd.args...)
	if err := errors.Join(err, c.leave(dir)); err != nil {
		return nil, err
	}
	_, _, err = recipe.Run(ctx, c.lab, c.root)
	return recipe, err
}

// recordRuns runs the command as often as a list needs.
func (c *cold) recordRuns(ctx context.Context, cmd command) error {
	p, err := c.network(0)
	if err != nil {
		return err
	}
	defer p.Close()
	for range trace.MinRuns {
		dir, flags := c.worker(p.URL())
		if _, _, err := c.lab.Run(ctx, flags, coldImage, cmd.args...); err != nil {
			return err
		}
		// Which ends the reader: it posts the run's record before.
		if err := c.leave(dir); err != nil {
			return err
		}
	}
	return nil
}

func (c *cold) network(rtt time.Duration) (*proxy.Proxy, error) {
	return proxy.New(proxy.Config{Target: strings.TrimPrefix(c.server.URL, "http://"), RTT: rtt, BitsPerSecond: proxy.Gigabit})
}

// at measures one command at one distance: every arm and the local folder in
// turn, several times. first is the number of the first sibling that has not run.
func (c *cold) at(ctx context.Context, cmd command, rtt time.Duration, first int, here *lab.Recipe, touch map[string]touched) error {
	p, err := c.network(rtt)
	if err != nil {
		return err
	}
	defer p.Close()
	arms := []arm{without, with, sibling}
	costs := make([][]cost, len(arms))
	var local []float64
	for round := range startRounds {
		_, took, err := here.Run(ctx, c.lab, c.root)
		if err != nil {
			return err
		}
		local = append(local, took.Seconds())
		for i, a := range arms {
			if a.image == siblingImage {
				a.image = siblingName(first + round)
			}
			got, err := c.run(ctx, p, a, cmd)
			if err != nil {
				return fmt.Errorf("%s: %w", a.name, err)
			}
			costs[i] = append(costs[i], got)
		}
	}
	base := median(local)
	fmt.Printf("     %-26s %6s %-16s %6.2f s\n", cmd.name, rtt, "local folder", base)
	for i, a := range arms {
		c.print(cmd, rtt, a, costs[i], base, touch[a.image])
	}
	return nil
}

// run starts the command on a worker that has never seen the image.
func (c *cold) run(ctx context.Context, p *proxy.Proxy, a arm, cmd command) (got cost, err error) {
	dir, flags := c.worker(p.URL())
	defer func() { err = errors.Join(err, c.leave(dir)) }()
	p.Record()
	before := p.Bytes()
	started := time.Now()
	if _, _, err = c.lab.Run(ctx, append(flags, a.flags...), a.image, cmd.args...); err != nil {
		return cost{}, err
	}
	took := time.Since(started)
	wire := p.Bytes() - before
	exchanges, err := p.Exchanges()
	if err != nil {
		return cost{}, err
	}
	got, err = costOf(exchanges)
	got.seconds, got.wire = took.Seconds(), wire
	return got, err
}

func (c *cold) print(cmd command, rtt time.Duration, a arm, costs []cost, base float64, t touched) {
	of := func(get func(cost) float64) float64 {
		var all []float64
		for _, k := range costs {
			all = append(all, get(k))
		}
		return median(all)
	}
	seconds := of(func(k cost) float64 { return k.seconds })
	requests := of(func(k cost) float64 { return float64(k.requests) })
	fetch := of(func(k cost) float64 { return float64(k.stored) }) / float64(t.stored)
	fmt.Printf("     %-26s %6s %-16s %6.2f s %7.2f× %9.0f %8.2f %9.2f %8.2f %6s\n", "", "", a.name, seconds, seconds/base, requests,
		of(func(k cost) float64 { return float64(k.wire) })/1e6, of(func(k cost) float64 { return float64(k.plain) })/1e6,
		float64(t.pages)*float64(os.Getpagesize())/1e6, strconv.FormatFloat(fetch, 'f', 2, 64))
	if cmd.name == wireCommand && rtt == gateRTT {
		pages := of(func(k cost) float64 { return float64(k.wire) }) / float64(t.device)
		c.b.figure("cold "+cmd.name+", "+a.name+": wire bytes ÷ pages touched", fmt.Sprintf("%.2f", pages))
	}
	if !cmd.gated || rtt != gateRTT {
		return
	}
	name := fmt.Sprintf("cold %s, %s, %s: ", cmd.name, rtt, a.name)
	c.b.atMost(name+"time ÷ local folder", seconds/base, a.ratio, "×")
	if a.requests > 0 {
		c.b.atMost(name+"requests", requests, a.requests, "")
		c.b.atMost(name+"over-fetch", fetch, a.fetch, "×")
	}
}
