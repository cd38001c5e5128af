// Command demo is `make demo`: the order service, the connector and the consumer
// at work, with every event on one line as it passes. In the middle it kills the
// connector and starts it again; at the end it compares what the database has
// committed with what the consumer has got.
//
// scripts/demo runs it on servers of its own: demo CDCPUB, where CDCPUB is the
// connector's program. DEMO_SECONDS says for how long.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/mattn/go-isatty"
)

// unattended is how long the demo runs where nobody can press Ctrl-C.
const unattended = 20 * time.Second

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run() error {
	terminal := isatty.IsTerminal(os.Stdout.Fd())
	length, err := runLength(os.Getenv("DEMO_SECONDS"), terminal)
	if err != nil {
		return err
	}
	if len(os.Args) != 2 {
		return errors.New("usage: demo CDCPUB")
	}
	dir, err := os.MkdirTemp("", "cdcpub-demo-")
	if err != nil {
		return fmt.Errorf("make temporary directory: %w", err)
	}
	d := &demo{screen: newScreen(os.Stdout, terminal), length: length}
	// SIGPIPE: the show is over when nobody watches any more, as after `| head`.
	// The first signal ends the show and waits for what is under way, the second
	// ends that, too.
	ctx, abort := context.WithCancelCause(context.Background())
	defer abort(nil)
	stop, end := context.WithCancel(ctx)
	defer end()
	d.abort = abort
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	go func() {
		<-signals
		end()
		<-signals
		abort(errors.New("interrupted twice"))
	}()
	err = d.run(ctx, stop, os.Args[1], dir)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause // and what failed is a consequence of it
	}
	return errors.Join(err, os.RemoveAll(dir))
}

// runLength is how long the demo runs; 0 is until Ctrl-C.
func runLength(seconds string, terminal bool) (time.Duration, error) {
	switch {
	case seconds == "" && terminal:
		return 0, nil
	case seconds == "":
		return unattended, nil
	}
	n, err := strconv.Atoi(seconds)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("DEMO_SECONDS is %q: want a number of seconds", seconds)
	}
	return time.Duration(n) * time.Second, nil
}
