// Package testproc holds what pgtest and rabbittest share: a server process that
// cannot outlive the test process, ports that can be bound a second time, and the
// end of a TestMain. It needs Linux.
package testproc

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/goleak"
)

// Process is a running server.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// Start runs cmd in a process group of its own, so that a Ctrl-C meant for the
// tests does not reach the server while they still use it. If the test process
// dies in whatever way, the kernel sends death to the server.
//
// cmd.Stdout and cmd.Stderr must be files: with a pipe, waiting would last until
// the server's last child has closed it.
func Start(cmd *exec.Cmd, death syscall.Signal) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = death
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The death signal is sent when the thread that forked ends, not the
		// process (prctl(2)): keep the thread for as long as the child runs.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // how a killed server exits says nothing
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// PID is the process's ID; it stays the same after the process has ended.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Running reports whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// ExitCode is the process's, once it is not running any more; -1 if a signal
// ended it.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Signal sends sig; a process that has ended already is no error.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal process %d: %w", p.PID(), err)
	}
	return nil
}

// Stop sends sig and waits until the process has ended, which it must do within
// limit. It returns how long that took.
func (p *Process) Stop(sig os.Signal, limit time.Duration) (time.Duration, error) {
	begin := time.Now()
	if err := p.Signal(sig); err != nil {
		return 0, err
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.done:
		return time.Since(begin), nil
	case <-timer.C:
		return time.Since(begin), fmt.Errorf("process %d still runs %s after signal %q", p.PID(), limit, sig)
	}
}

// Ready calls probe until it returns nil. It fails when the process ends before
// that or ctx does.
func (p *Process) Ready(ctx context.Context, every time.Duration, probe func(context.Context) error) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-p.done:
			return fmt.Errorf("process %d ended (%s) before it was ready", p.PID(), p.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("process %d not ready: %w (last: %w)", p.PID(), ctx.Err(), err)
		}
	}
}

// FreePort returns a TCP port of 127.0.0.1 that nobody listens on. It lies below
// Linux's usual range for outgoing connections (32768 and up): a client that
// reconnects to a stopped server could otherwise be given the server's own port
// and keep it from coming back.
func FreePort() (int, error) {
	const low, high, attempts = 10000, 32000, 100
	for range attempts {
		n, err := rand.Int(rand.Reader, big.NewInt(high-low))
		if err != nil {
			return 0, fmt.Errorf("choose port: %w", err)
		}
		if port := low + int(n.Int64()); PortFree(port) {
			return port, nil
		}
	}
	return 0, fmt.Errorf("find free port: %d random ones between %d and %d are all taken", attempts, low, high)
}

// PortFree reports whether port of 127.0.0.1 can be listened on.
func PortFree(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}

// Tail returns the end of the file at path, at most about lines lines of it, or
// why it cannot be read. It is meant for people who look at a failed test.
func Tail(path string, lines int) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

// UniqueName makes a name out of a test's name that no other test and no other
// run has: lower-case letters, digits and underscores, at most 48 bytes.
func UniqueName(test string) string {
	const longest = 36
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		}
		return '_'
	}, strings.TrimPrefix(test, "Test"))
	if len(clean) > longest {
		clean = clean[:longest]
	}
	return "t_" + clean + "_" + RandomHex(4)
}

// RandomHex returns n random bytes in hexadecimal.
func RandomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails since Go 1.24: the program ends instead
	return hex.EncodeToString(b)
}

// Runner is what TestMain runs: a *testing.M, or one inside a server's wrapper.
type Runner interface{ Run() int }

// RunnerFunc is a function as a Runner.
type RunnerFunc func() int

// Run calls f.
func (f RunnerFunc) Run() int { return f() }

// RunWithoutLeaks runs m and then looks for goroutines left behind. It returns
// m's exit code, or 1 if all tests passed but goroutines leaked; of failed tests
// a leak is but a consequence.
func RunWithoutLeaks(m Runner) int {
	code := m.Run()
	if code != 0 {
		return code
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintf(os.Stderr, "the tests passed but left goroutines behind: %v\n", err)
		return 1
	}
	return 0
}
