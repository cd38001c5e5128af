package tests

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/internal/testproc"
)

// readmeBlocks returns the shell blocks of the README by the name in the comment
// above each. A block without one would go untested.
func readmeBlocks(t *testing.T) map[string]string {
	t.Helper()
	b, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	blocks := map[string]string{}
	for _, m := range regexp.MustCompile("(?s)<!-- readme-test: ([a-z_]+) -->\n```sh\n(.*?)```\n").FindAllStringSubmatch(text, -1) {
		blocks[m[1]] = m[2]
	}
	if n := strings.Count(text, "```sh\n"); n != len(blocks) || n == 0 {
		t.Fatalf("README.md has %d shell blocks, %d of them with a name of their own for this test", n, len(blocks))
	}
	return blocks
}

// reader is who follows the README: a directory, servers that are there already,
// and a shell.
type reader struct {
	t      *testing.T
	dir    string
	bin    string // programs that the README calls
	pg     *pgtest.Server
	rabbit *rabbittest.Server
	env    []string
}

// newReader makes a directory and those programs that a test cannot have: sudo,
// and systemctl, which asks for a restart of our server instead of a service.
func newReader(t *testing.T, pg *pgtest.Server, rabbit *rabbittest.Server) *reader {
	t.Helper()
	r := &reader{t: t, dir: t.TempDir(), bin: t.TempDir(), pg: pg, rabbit: rabbit}
	in := func(name string) string { return filepath.Join(r.bin, name) }
	for name, script := range map[string]string{
		"sudo":      `exec "$@"`,
		"systemctl": fmt.Sprintf("[ \"$*\" = 'restart postgresql' ] || exit 1\n: >%q\nwhile [ ! -e %q ]; do sleep 0.1; done", in("asked"), in("restarted")),
	} {
		if err := os.WriteFile(in(name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(os.Getenv(binaryVariable), in("cdcpub")); err != nil {
		t.Fatal(err)
	}
	if err := rabbit.CtlScript(in("rabbitmqctl")); err != nil {
		t.Fatal(err)
	}
	if _, err := rabbit.Ctl("add_user", "admin", "secret"); err != nil {
		t.Fatal(err)
	}
	if _, err := rabbit.Ctl("set_permissions", "admin", ".*", ".*", ".*"); err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(pg.Addr())
	if err != nil {
		t.Fatal(err)
	}
	listen, err := testproc.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	r.env = []string{"PATH=" + r.bin + ":" + os.Getenv("PATH"), "PGPORT=" + port, fmt.Sprintf("CDCPUB_MONITOR_LISTEN=127.0.0.1:%d", listen)}
	return r
}

// follow starts the commands in one shell, as they stand but for the addresses of
// the servers. At the test's cleanup all that they have started is ended.
func (r *reader) follow(commands string) *testproc.Process {
	r.t.Helper()
	commands = strings.NewReplacer("localhost:5432", r.pg.Addr(), "localhost:5672", r.rabbit.Addr()).Replace(commands)
	output, err := os.Create(filepath.Join(r.bin, "output"))
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command("sh", "-exc", commands)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = r.dir, r.env, output, output
	shell, err := testproc.Start(cmd, syscall.SIGKILL)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := syscall.Kill(-shell.PID(), syscall.SIGTERM); err != nil {
			r.t.Error(err)
		}
		eventually(r.t, 20*time.Second, "the connector has stopped", func() bool { return syscall.Kill(-shell.PID(), 0) != nil })
		r.t.Logf("the shell's output:\n%s", testproc.Tail(output.Name(), 200))
		_ = output.Close() // others have written it
	})
	return shell
}

// restart does what systemctl was asked for.
func (r *reader) restart() {
	r.t.Helper()
	eventually(r.t, 20*time.Second, "a restart is asked for", func() bool {
		_, err := os.Stat(filepath.Join(r.bin, "asked"))
		return err == nil
	})
	if _, err := r.pg.Stop(pgtest.Fast); err != nil {
		r.t.Fatal(err)
	}
	if err := r.pg.Start(); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.bin, "restarted"), nil, 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// arrived waits for the README's message in the README's queue.
func (r *reader) arrived() {
	r.t.Helper()
	eventually(r.t, time.Minute, "the queue of init --broker has a message", func() bool {
		ch := rabbittest.Channel(r.t, r.rabbit.URL())
		q, err := ch.QueueDeclarePassive("cdcpub.events", true, false, false, false, nil)
		return err == nil && q.Messages > 0
	})
	d := rabbittest.Drain(r.t, r.rabbit.URL(), "cdcpub.events", 1, time.Minute)[0]
	if d.Exchange != "outbox.event.order" || d.RoutingKey != "42" || d.Type != "OrderPaid" {
		r.t.Errorf("message %s %s %s, want the README's", d.Exchange, d.RoutingKey, d.Type)
	}
}

func TestReadmeReachesTheFirstMessageInFiveCommands(t *testing.T) {
	t.Parallel()
	commands := readmeBlocks(t)["five"]
	if n := strings.Count(commands, "\n"); n > 5 || !strings.HasSuffix(commands, "cdcpub run\n") {
		t.Errorf("%d commands, want at most 5, the last being run:\n%s", n, commands)
	}
	pg := pgtest.Start(t)
	pgtest.Exec(t, pg.DSN("postgres"), "CREATE DATABASE shop")
	r := newReader(t, pg, rabbittest.Start(t))
	r.follow(commands)
	r.arrived()
}

func TestReadmeWalkThrough(t *testing.T) {
	t.Parallel()
	blocks := readmeBlocks(t)
	pg := pgtest.Start(t, pgtest.Default("wal_level"))
	pgtest.Exec(t, pg.DSN("postgres"), "CREATE ROLE shop LOGIN")
	pgtest.Exec(t, pg.DSN("postgres"), "CREATE DATABASE shop OWNER shop")
	r := newReader(t, pg, rabbittest.Start(t))
	var commands string
	for _, name := range []string{"wal_level", "role", "init", "user", "broker", "run"} {
		if blocks[name] == "" {
			t.Fatalf("README.md has no block %q", name)
		}
		commands += blocks[name]
	}
	shell := r.follow(commands)
	r.restart()
	r.arrived()
	eventually(t, time.Minute, "the shell has run all commands", func() bool { return !shell.Running() })
	if code := shell.ExitCode(); code != 0 {
		t.Errorf("exit %d", code)
	}
}
