package main

import (
	"bufio"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// asProgram makes the test binary be the program itself.
const asProgram = "CDCPUB_TESTENV_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.Stderr = os.Stderr
	// Away from a terminal, where signals to the program are passed on.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM}
	return cmd
}

func TestNoCommandIsAUsageError(t *testing.T) {
	cmd := program(t, "--")
	cmd.Stderr = nil
	_ = cmd.Run()
	if got := cmd.ProcessState.ExitCode(); got != exitUsage {
		t.Errorf("exit code %d, want %d", got, exitUsage)
	}
}

func TestCommandHasServersGetsSignalsAndTakesTheServersWithIt(t *testing.T) {
	const script = `trap 'exit 7' TERM; echo "$CDCPUB_TEST_POSTGRES $CDCPUB_TEST_RABBITMQ"; read -r _`
	cmd := program(t, "--", "sh", "-c", script)
	stdin, err := cmd.StdinPipe() // never written to: the command waits for its signal
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Signal(syscall.SIGTERM) }()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	dsn, amqpURL, _ := strings.Cut(strings.TrimSpace(line), " ")
	if got := pgtest.Query[string](t, dsn, "SHOW wal_level"); got != "logical" {
		t.Errorf("wal_level is %s", got)
	}
	t.Run("a channel opens", func(t *testing.T) { rabbittest.Channel(t, amqpURL) })

	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 7 {
		t.Errorf("exit code %d, want the command's", got)
	}
	for _, server := range []string{dsn, amqpURL} {
		u, err := url.Parse(server)
		if err != nil {
			t.Fatal(err)
		}
		if conn, err := net.Dial("tcp", u.Host); err == nil {
			_ = conn.Close()
			t.Errorf("%s still answers", u.Host)
		}
	}
}
