package tests

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/internal/testproc"
)

// terminal is a pseudo terminal (pty(7)) and what was written to it.
type terminal struct {
	master, slave *os.File
	reading       sync.WaitGroup
	mu            sync.Mutex
	text          bytes.Buffer
}

func openTerminal(t *testing.T) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatalf("unlock the terminal: %v", err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatalf("ask for the terminal's number: %v", err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{master: master, slave: slave}
	term.reading.Go(func() {
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b) // fails once nobody has the other end open
			term.mu.Lock()
			term.text.Write(b[:n])
			term.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		_ = slave.Close() // nothing was written here
		term.reading.Wait()
		_ = master.Close()
		if t.Failed() {
			t.Logf("on the terminal:\n%s", term.String())
		}
	})
	return term
}

// String is what is on the terminal, with plain line ends.
func (term *terminal) String() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return strings.ReplaceAll(term.text.String(), "\r\n", "\n")
}

// startOn runs the connector on a terminal.
func (c *connector) startOn(term *terminal, args ...string) {
	c.t.Helper()
	cmd := c.command(append([]string{"run"}, args...)...)
	cmd.Stdout, cmd.Stderr = term.slave, c.log
	proc, err := testproc.Start(cmd, syscall.SIGKILL)
	if err != nil {
		c.t.Fatal(err)
	}
	c.proc = proc
}

// Who starts run by hand for the first time is told within three seconds what is
// missing, by which command it comes, and that events flow once it is there.
func TestFirstRunOnATerminalSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	insert := func(n int) {
		t.Helper()
		for range n {
			pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', gen_random_uuid(), 'Made', '{}', 1)")
		}
	}
	insert(3)
	term := openTerminal(t)
	c.startOn(term)
	eventually(t, 20*time.Second, "the events are with the connector", func() bool { return c.status().Relay.Pending == 3 })
	began := time.Now()
	want := "3 events wait: exchange " + name + ".order is missing; run: cdcpub init --broker\n"
	eventually(t, 3*time.Second, "the terminal says what is missing", func() bool { return strings.Contains(term.String(), want) })
	t.Logf("said %s after the events had waited", time.Since(began).Round(time.Millisecond))

	// The printed command, and what it leads to. Its queue is the test's to remove.
	queue := name + ".look"
	rabbittest.Queue(t, url, queue, "", "", nil)
	c.must("init", "--broker", "--queue", queue)
	eventually(t, 20*time.Second, "the terminal says that events flow", func() bool {
		return strings.Contains(term.String(), "events flow again\n") && strings.Contains(term.String(), "old rows: all 3 published in ")
	})
	rabbittest.Drain(t, url, queue, 3, time.Minute)
	insert(2)
	eventually(t, 15*time.Second, "the terminal says what is published", func() bool { return strings.Contains(term.String(), "published 2 events (") })
	if !strings.HasPrefix(term.String(), "connected: reading slot "+name+" (public.outbox) and publishing\n") || strings.Contains(term.String(), "[INFO]") {
		t.Error("want plain lines that begin with the connection")
	}
	c.stop()
	c.must("teardown", "--yes")
}

// A log collector gets the log and nothing else.
func TestWithoutATerminalNothingIsToldOnStandardOutput(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', '42', 'Made', '{}', 1)")
	c.start()
	eventually(t, 20*time.Second, "the event waits", func() bool { return c.status().Relay.WaitingAggregates == 1 })
	// Longer than a terminal would have to wait for it.
	until := time.Now().Add(3 * time.Second)
	eventually(t, 10*time.Second, "three seconds have passed", func() bool { return time.Now().After(until) })
	c.stop()
	b, err := os.ReadFile(c.log.Name())
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), "event waits:"); n != 1 {
		t.Errorf("the log names the waiting event %d times, want once", n)
	}
	for line := range strings.Lines(string(b)) {
		if !strings.Contains(line, "cdcpub") || !strings.Contains(line, "[") {
			t.Errorf("a line that is none of the log's: %q", line)
		}
	}
}
