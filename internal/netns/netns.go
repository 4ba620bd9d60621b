// Package netns makes network namespaces that stay without a process in them, and runs
// functions in them.
package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Do runs fn in the network namespace that path names: sockets that it makes stay
// there. Goroutines that fn starts are elsewhere.
func Do(path string, fn func() error) error {
	return thread(func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
		f.Close()
		if err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// Make makes a namespace and mounts it on path, an empty file that it makes. Remove ends
// it.
func Make(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
	if err != nil {
		return err
	}
	f.Close()
	err = thread(func() error {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		return err
	})
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("make a network namespace: %w", err)
	}
	return nil
}

// Remove undoes Make.
func Remove(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	return os.Remove(path)
}

// thread runs fn on a thread that ends with it. That is never the main one: Go does not
// end it, and /proc/self and other processes take its namespaces for the process's.
func thread(fn func() error) error {
	result := make(chan error, 1)
	go func() { // ends with fn
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			result <- thread(fn) // another one, as this one is locked
			runtime.UnlockOSThread()
			return
		}
		result <- fn()
	}()
	return <-result
}
