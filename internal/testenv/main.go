// Command testenv runs a command with a PostgreSQL and a RabbitMQ server of its
// own. It is what scripts/test-env builds and runs:
//
//	scripts/test-env -- go test ./...
//
// The command finds the servers in CDCPUB_TEST_POSTGRES and CDCPUB_TEST_RABBITMQ,
// where pgtest and rabbittest look first, so that many test processes share one
// pair. When the command ends, so do the servers; the exit code is the command's.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// The exit codes that are not the command's; 126 and above as shells use them.
const (
	exitFailure    = 1
	exitUsage      = 2
	exitNotStarted = 127
	exitSignal     = 128 // plus the signal's number
)

func main() {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "usage: test-env [--] COMMAND [ARGUMENT]...")
		os.Exit(exitUsage)
	}
	os.Exit(run(args))
}

func run(args []string) int {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	pair, sig, err := start(signals)
	if err != nil {
		fmt.Fprintln(os.Stderr, "test-env:", err)
	}
	code := exitFailure
	switch {
	case sig != 0:
		code = exitSignal + int(sig)
	case err == nil:
		if code, err = runCommand(args, pair, signals); err != nil {
			fmt.Fprintln(os.Stderr, "test-env:", err)
		}
	}
	if err := pair.close(); err != nil {
		fmt.Fprintln(os.Stderr, "test-env:", err)
		code = max(code, exitFailure)
	}
	return code
}

// servers is the pair; either is nil if it could not be started.
type servers struct {
	postgres *pgtest.Server
	rabbit   *rabbittest.Server
}

// start starts both servers at the same time. A signal meanwhile makes it give up
// and return that signal. What did start must be closed in any case.
func start(signals <-chan os.Signal) (servers, syscall.Signal, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var s servers
	var pgErr, rabbitErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		if s.postgres, pgErr = pgtest.New(ctx); pgErr != nil {
			cancel()
		}
	})
	wg.Go(func() {
		if s.rabbit, rabbitErr = rabbittest.New(ctx); rabbitErr != nil {
			cancel()
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		wg.Wait()
	}()
	select {
	case <-done:
	case sig := <-signals:
		cancel()
		<-done
		return s, sig.(syscall.Signal), nil
	}
	// That one was given up because the other failed says nothing.
	if pgErr != nil && !errors.Is(pgErr, context.Canceled) {
		return s, 0, pgErr
	}
	return s, 0, rabbitErr
}

func (s servers) close() error {
	var pgErr, rabbitErr error
	var wg sync.WaitGroup
	if s.postgres != nil {
		wg.Go(func() { pgErr = s.postgres.Close() })
	}
	if s.rabbit != nil {
		wg.Go(func() { rabbitErr = s.rabbit.Close() })
	}
	wg.Wait()
	return errors.Join(pgErr, rabbitErr)
}

// runCommand runs the command in this terminal, passes signals on to it and
// returns its exit code once it has ended.
func runCommand(args []string, s servers, signals <-chan os.Signal) (int, error) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(),
		"CDCPUB_TEST_POSTGRES="+s.postgres.DSN("postgres"),
		"CDCPUB_TEST_RABBITMQ="+s.rabbit.URL())
	// In the foreground of a terminal the command must stay in this process group
	// to be able to read, and the kernel sends it Ctrl-C by itself: passed on, it
	// would count as a second one, which many programs take for "now, at once".
	foreground := inForeground()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: !foreground, Pdeathsig: syscall.SIGTERM}
	// The death signal belongs to the thread (prctl(2)), which must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return exitNotStarted, fmt.Errorf("start command: %w", err)
	}
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case sig := <-signals:
				if sig != unix.SIGINT || !foreground {
					_ = cmd.Process.Signal(sig) // it may have ended just now
				}
			case <-ended:
				return
			}
		}
	})
	err := cmd.Wait()
	close(ended)
	wg.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return exitFailure, fmt.Errorf("wait for command: %w", err)
	}
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return exitSignal + int(status.Signal()), nil
	}
	return status.ExitStatus(), nil
}

// inForeground reports whether this process group is the one that its terminal
// sends Ctrl-C to.
func inForeground() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
