package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

const (
	startTime = 30 * time.Second
	stopTime  = 15 * time.Second // more than relay.shutdown_timeout
	tailLines = 30
)

var errEnded = errors.New("the connector has ended by itself")

// connector runs the program under its real conditions: a process of its own,
// configured by its environment, with nothing but its state directory to
// remember by. One goroutine uses it.
type connector struct {
	program string
	dir     string // holds the state and the log
	environ []string
	monitor string // host:port

	cmd   *exec.Cmd     // of the newest process
	ended chan struct{} // closed when that has ended; nil if none is meant to run
}

func newConnector(program, dir, dsn, broker string) (*connector, error) {
	program, err := filepath.Abs(program)
	if err != nil {
		return nil, fmt.Errorf("find the connector: %w", err)
	}
	monitor, err := freeAddress()
	if err != nil {
		return nil, err
	}
	c := &connector{program: program, dir: dir, monitor: monitor}
	// The settings of the user's own connector are not for this one.
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "CDCPUB_") {
			c.environ = append(c.environ, e)
		}
	}
	c.environ = append(c.environ,
		"CDCPUB_SOURCE_DSN="+dsn,
		"CDCPUB_PUBLISH_URL="+broker,
		"CDCPUB_OFFSETS_PATH="+filepath.Join(dir, "state"),
		"CDCPUB_MONITOR_LISTEN="+c.monitor)
	return c, nil
}

// freeAddress chooses a port of the loopback interface, so that the status stays
// where it was over the restart. It lies below Linux's usual range for outgoing
// connections (32768 and up), of which one could be given it while the connector
// is down.
func freeAddress() (string, error) {
	const low, high, attempts = 10_000, 32_000, 100
	for range attempts {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", low+rand.IntN(high-low)))
		if err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", fmt.Errorf("find a free port: %d random ones are all taken", attempts)
}

// command also sets the working directory, since a cdcpub.yml in the user's would
// be read, and a process group: the terminal's Ctrl-C is for the demo, which stops
// the connector last. It must not outlive the demo, however that ends.
func (c *connector) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.program, args...)
	cmd.Dir, cmd.Env = c.dir, c.environ
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// init runs `cdcpub init`.
func (c *connector) init(ctx context.Context, s *screen) error {
	runtime.LockOSThread() // as in start
	defer runtime.UnlockOSThread()
	out, err := c.command(ctx, "init", "--create-table").CombinedOutput()
	text := strings.TrimSpace(string(out))
	if err != nil {
		return fmt.Errorf("cdcpub init: %w\n%s", err, text)
	}
	for line := range strings.Lines(text) {
		s.say("cdcpub init: %s", strings.TrimSpace(line))
	}
	return nil
}

// start runs `cdcpub run` and waits until it is ready to publish.
func (c *connector) start(ctx context.Context) error {
	log, err := os.OpenFile(c.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the connector's log: %w", err)
	}
	defer log.Close()
	cmd := c.command(context.WithoutCancel(ctx), "run")
	cmd.Stdout, cmd.Stderr = log, log
	started, ended := make(chan error), make(chan struct{})
	go func() {
		// The death signal is sent when the thread that forked ends, not the process
		// (prctl(2)): keep the thread for as long as the child runs.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // the exit code is in cmd.ProcessState
		}
		close(ended)
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start the connector: %w", err)
	}
	c.cmd, c.ended = cmd, ended
	return c.ready(ctx)
}

func (c *connector) ready(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(limited, http.MethodGet, c.url("/readyz"), nil)
		if err != nil {
			return fmt.Errorf("ask whether the connector is ready: %w", err)
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		if err := c.wait(limited, 50*time.Millisecond); err != nil {
			return err
		}
		if limited.Err() != nil {
			return fmt.Errorf("the connector is not ready after %s", startTime)
		}
	}
}

// wait returns after limit or when ctx ends, and with an error when the connector
// ends although it is meant to run.
func (c *connector) wait(ctx context.Context, limit time.Duration) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return nil
	case <-c.ended:
		return errEnded
	}
}

// kill ends the connector as a crash would and waits for that.
func (c *connector) kill() {
	if c.ended == nil {
		return
	}
	_ = c.cmd.Process.Kill() // fails only if it has ended already
	<-c.ended
	c.ended = nil
}

// terminate asks the connector to stop, which it must do within stopTime and
// with exit code 0.
func (c *connector) terminate(ctx context.Context) error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop the connector: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	select {
	case <-c.ended:
	case <-limited.Done():
		return fmt.Errorf("the connector still runs %s after SIGTERM", stopTime)
	}
	if state := c.cmd.ProcessState; !state.Success() {
		return fmt.Errorf("the connector was stopped with SIGTERM and ended with %s", state)
	}
	return nil
}

// explain adds the end of the connector's log to an error.
func (c *connector) explain(err error) error {
	log, readErr := os.ReadFile(c.logPath())
	if readErr != nil {
		return err // it never started
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	lines = lines[max(0, len(lines)-tailLines):]
	return fmt.Errorf("%w\nthe end of the connector's log:\n%s", err, strings.Join(lines, "\n"))
}

func (c *connector) pid() int { return c.cmd.Process.Pid }

func (c *connector) url(path string) string { return "http://" + c.monitor + path }

func (c *connector) logPath() string { return filepath.Join(c.dir, "cdcpub.log") }
