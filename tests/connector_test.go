package tests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

// connector is the command as a process, with its configuration in the
// environment and its state in a directory.
type connector struct {
	t      *testing.T
	env    map[string]string
	listen string
	log    *os.File
	proc   *testproc.Process
}

// newConnector prepares a connector for one database and broker. The slot, the
// publication and the exchanges bear name.
func newConnector(t *testing.T, dsn, amqpURL, name string) *connector {
	t.Helper()
	port, err := testproc.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "connector.log"))
	if err != nil {
		t.Fatal(err)
	}
	c := &connector{t: t, log: log, listen: "127.0.0.1:" + strconv.Itoa(port)}
	c.env = map[string]string{
		"PATH":                      os.Getenv("PATH"),
		"CDCPUB_SOURCE_DSN":         dsn,
		"CDCPUB_SOURCE_SLOT":        name,
		"CDCPUB_SOURCE_PUBLICATION": name,
		"CDCPUB_ROUTER_EXCHANGE":    name + ".{aggregate_type}",
		"CDCPUB_PUBLISH_URL":        amqpURL,
		"CDCPUB_OFFSETS_PATH":       filepath.Join(t.TempDir(), "state"),
		"CDCPUB_MONITOR_LISTEN":     c.listen,
	}
	t.Cleanup(func() {
		c.kill()
		if t.Failed() {
			t.Logf("the end of the connector's log:\n%s", testproc.Tail(log.Name(), 40))
		}
		_ = log.Close() // a log that was read already
	})
	return c
}

func (c *connector) command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Getenv(binaryVariable), args...)
	cmd.Env = []string{}
	for k, v := range c.env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	return cmd
}

// cli runs a subcommand to its end and returns its output and exit code.
func (c *connector) cli(args ...string) (stdout, stderr string, code int) {
	c.t.Helper()
	cmd := c.command(args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		c.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// must runs a subcommand that has to succeed.
func (c *connector) must(args ...string) {
	c.t.Helper()
	if _, stderr, code := c.cli(args...); code != 0 {
		c.t.Fatalf("cdcpub %s: exit %d: %s", strings.Join(args, " "), code, stderr)
	}
}

// start runs the connector; its log goes on where the last run's ended.
func (c *connector) start(args ...string) {
	c.t.Helper()
	cmd := c.command(append([]string{"run"}, args...)...)
	cmd.Stdout, cmd.Stderr = c.log, c.log
	proc, err := testproc.Start(cmd, syscall.SIGKILL)
	if err != nil {
		c.t.Fatal(err)
	}
	c.proc = proc
}

// kill is kill -9.
func (c *connector) kill() {
	if c.proc == nil {
		return
	}
	if _, err := c.proc.Stop(syscall.SIGKILL, 10*time.Second); err != nil {
		c.t.Error(err)
	}
	c.proc = nil
}

// stop is SIGTERM; the connector must end by itself in its time.
func (c *connector) stop() time.Duration {
	c.t.Helper()
	took, err := c.proc.Stop(syscall.SIGTERM, 15*time.Second)
	if err != nil {
		c.t.Fatal(err)
	}
	c.proc = nil
	return took
}

// status is what the tests read of /api/status.
type status struct {
	State   string
	Ready   bool
	Reason  string
	Refusal *struct{ Code, Text, Hint string }
	Stages  []struct {
		Name     string
		Position struct{ LSN uint64 }
	}
	Relay struct {
		Pending           int
		WaitingAggregates int `json:"waiting_aggregates"`
	}
	Counters struct {
		EventsRead uint64 `json:"events_read"`
		Confirmed  uint64
		Returned   uint64
		Suppressed uint64
	}
}

func (s status) stage(name string) uint64 {
	for _, st := range s.Stages {
		if st.Name == name {
			return st.Position.LSN
		}
	}
	return 0
}

// status asks the running connector; the zero value if it does not answer.
func (c *connector) status() status {
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + c.listen + "/api/status")
	if err != nil {
		return status{}
	}
	defer resp.Body.Close()
	var s status
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		return status{}
	}
	return s
}

// peakMemory is the process's largest resident set so far, in bytes.
func (c *connector) peakMemory() int64 {
	c.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.proc.PID()))
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var kb int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kb); n == 1 {
			return kb << 10
		}
	}
	c.t.Fatal("no VmHWM in /proc")
	return 0
}

// eventually polls until ok holds: the servers and the connector are other
// processes and give no signal to wait for.
func eventually(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(limit)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("not within %s: %s", limit, what)
		case <-tick.C:
		}
	}
}
