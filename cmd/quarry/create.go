package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"quarry/worker/sandbox"
)

type createOptions struct {
	node      nodeTarget
	spec      sandbox.Spec
	key       string
	labels    []string
	allow     []string
	shares    []string
	memory    byteSize
	cpus      float64
	ttl       time.Duration
	idle      time.Duration
	idlePause time.Duration
	asJSON    bool
}

func newCreate() *cobra.Command {
	var o createOptions
	c := &cobra.Command{
		Use:   "create [flags] IMAGE [--] [ARG…]",
		Short: "make a sandbox on a worker and print its id",
		Long: `create makes a sandbox and returns when it runs. Commands are run in it with quarry exec. Words
after IMAGE are the sandbox's first process, with which it ends; without them there is none but a sleeper.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(c, fmt.Errorf("no IMAGE given"))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			o.spec.Image, o.spec.Entrypoint = args[0], args[1:]
			return runCreate(c.Context(), o, c.OutOrStdout())
		},
	}
	o.node.flags(c)
	f := c.Flags()
	f.SetInterspersed(false)
	f.StringVar(&o.key, "key", "", "idempotency key: the same key with the same flags prints the same sandbox")
	f.StringArrayVarP(&o.spec.Env, "env", "e", nil, "set K=V; may be repeated")
	f.StringVarP(&o.spec.WorkDir, "workdir", "w", "", "working directory")
	f.StringVarP(&o.spec.User, "user", "u", "", "USER[:GROUP], names or numbers, looked up in the image")
	f.Var(&o.memory, "mem", "memory limit, such as 512M or 4G")
	f.Float64Var(&o.cpus, "cpus", 0, "processors, such as 1.5")
	f.Int64Var(&o.spec.OutputMB, "output-mb", 0, "MiB that are kept of the output of its execs together")
	f.Int64Var(&o.spec.DiskMB, "disk-mb", 0, "MiB that it may write")
	f.Int64Var(&o.spec.PIDs, "pids", 0, "processes and threads")
	f.DurationVar(&o.ttl, "ttl", 0, "end it after this time")
	f.DurationVar(&o.idle, "idle", 0, "end it when nobody used it for so long")
	f.DurationVar(&o.idlePause, "idle-pause", 0, "pause it when no command ran and no file was written for so long; the next one wakes it; less than 0 is never (default the worker's)")
	f.StringArrayVar(&o.labels, "label", nil, "K=V; may be repeated")
	f.StringVar(&o.spec.Group, "group", "", "group that it belongs to")
	f.StringVar(&o.spec.Role, "role", "", "rollout, or grade: neither recorded in traces nor started by them")
	f.StringArrayVar(&o.allow, "allow", nil, "HOST[:PORT], *.HOST[:PORT] or CIDR[:PORT] that it may reach; may be repeated; without one it is nobody")
	f.StringArrayVar(&o.shares, "share", nil, "NAME/PATH:TARGET: a file or folder of the worker's --share NAME, read-only at TARGET; may be repeated")
	f.BoolVar(&o.asJSON, "json", false, "print the sandbox as JSON, with its token")
	return c
}

// fill turns flags into the spec.
func (o *createOptions) fill() error {
	for _, text := range o.labels {
		k, v, ok := strings.Cut(text, "=")
		if !ok || k == "" {
			return fmt.Errorf("%w: --label %q: want K=V", errUsage, text)
		}
		if o.spec.Labels == nil {
			o.spec.Labels = map[string]string{}
		}
		o.spec.Labels[k] = v
	}
	for _, text := range o.allow {
		r, err := parseRule(text)
		if err != nil {
			return err
		}
		o.spec.Network.Allow = append(o.spec.Network.Allow, r)
	}
	for _, text := range o.shares {
		name, at, ok := strings.Cut(text, ":")
		if !ok || !strings.HasPrefix(at, "/") {
			return fmt.Errorf("%w: --share %q: want NAME/PATH:/TARGET", errUsage, text)
		}
		o.spec.Shares = append(o.spec.Shares, sandbox.Share{Name: name, Target: at})
	}
	o.spec.CPUMilli = int64(math.Round(o.cpus * 1000))
	if o.spec.CPUMilli == 0 && o.cpus != 0 {
		return fmt.Errorf("%w: --cpus %v: want 0.001 or more", errUsage, o.cpus)
	}
	var errs [4]error
	o.spec.MemoryMB, errs[0] = o.memory.mib("mem")
	o.spec.TTL, errs[1] = units("ttl", o.ttl, time.Second)
	o.spec.Idle, errs[2] = units("idle", o.idle, time.Second)
	o.spec.IdlePause, errs[3] = units("idle-pause", o.idlePause, time.Millisecond)
	return cmp.Or(errs[:]...)
}

// parseRule reads HOST[:PORT] or CIDR[:PORT].
func parseRule(text string) (sandbox.Rule, error) {
	var r sandbox.Rule
	to, port, hasPort := strings.Cut(text, ":")
	if hasPort {
		n, err := strconv.Atoi(port)
		if err != nil || n < 1 || n > 65535 {
			return r, fmt.Errorf("%w: --allow %q: want a port from 1 to 65535 behind the colon", errUsage, text)
		}
		r.Ports = []sandbox.Port{{Protocol: "tcp", Number: n}}
	}
	if strings.Contains(to, "/") {
		r.CIDR = to
	} else {
		r.Host = to
	}
	return r, nil
}

func runCreate(ctx context.Context, o createOptions, stdout io.Writer) error {
	if err := o.fill(); err != nil {
		return err
	}
	c, err := o.node.dial()
	if err != nil {
		return err
	}
	sb, err := c.Create(ctx, o.spec, o.key)
	if err != nil {
		return err
	}
	if o.asJSON {
		return json.NewEncoder(stdout).Encode(sb)
	}
	_, err = fmt.Fprintln(stdout, sb.ID)
	return err
}

func newRm() *cobra.Command {
	var node nodeTarget
	c := &cobra.Command{
		Use:   "rm SANDBOX…",
		Short: "end sandboxes of a worker and print how each ended",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(c, fmt.Errorf("no SANDBOX given"))
			}
			return nil
		},
		RunE: func(c *cobra.Command, ids []string) error {
			cl, err := node.dial()
			if err != nil {
				return err
			}
			for _, id := range ids {
				end, err := cl.Delete(c.Context(), id)
				if err != nil {
					return fmt.Errorf("%s: %w", id, err)
				}
				fmt.Fprintf(c.OutOrStdout(), "%s\t%s: %s\n", oneLine(id), end.Reason, oneLine(end.Message))
			}
			return nil
		},
	}
	node.flags(c)
	return c
}
