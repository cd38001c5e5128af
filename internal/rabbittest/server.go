// Package rabbittest runs private, real RabbitMQ servers for tests and gives each
// test queues of its own.
//
// A server takes several seconds to boot, so most packages share one per test
// process:
//
//	func TestMain(m *testing.M) { os.Exit(rabbittest.Main(m)) }
//
// and with a PostgreSQL server too:
//
//	func TestMain(m *testing.M) { os.Exit(rabbittest.Main(pgtest.Wrap(m))) }
//
// A test that stops, kills or configures a server starts its own one with Start.
// The programs come from the system's packages, /usr/lib/rabbitmq/bin, or from the
// directory that CDCPUB_TEST_RABBIT_BIN names.
package rabbittest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

const (
	startLimit = 2 * time.Minute // a boot takes 5 to 8 s on two idle cores
	stopLimit  = time.Minute
	ctlLimit   = time.Minute
	tailLines  = 60
	// ctlPorts is how many command-line tools can run at the same time.
	ctlPorts = 10
)

// Server is one RabbitMQ node with its own directories, ports and port mapper
// (epmd), all on 127.0.0.1. URL and Addr may be called at any time, Ctl too while
// the node runs; of the other methods only one at once.
type Server struct {
	bin      string
	dir      string
	ports    ports
	password string
	config   map[string]string // further keys of rabbitmq.conf
	plugins  []string
	epmd     *testproc.Process // nil: not started yet
	proc     *testproc.Process // nil: not started yet
}

type ports struct {
	amqp, dist, epmd int
	management       int // only with the plugin
	ctl              int // the first of ctlPorts
}

// Option changes how a server is set up.
type Option func(*Server)

// Setting sets a key of rabbitmq.conf, such as max_message_size, over rabbittest's
// own choice and the server's default.
func Setting(key, value string) Option {
	return func(s *Server) { s.config[key] = value }
}

// Management enables the management plugin, which takes a port of its own and a
// few seconds of the boot. See ManagementURL.
func Management() Option {
	return func(s *Server) { s.plugins = append(s.plugins, "rabbitmq_management") }
}

// defaultSettings keeps alarms away, which would block every publisher: the
// machine's disk and memory are not what tests are about.
func defaultSettings() map[string]string {
	return map[string]string{
		"disk_free_limit.absolute":          "10MB",
		"vm_memory_high_watermark.absolute": "512MiB",
		"collect_statistics_interval":       "60000",
	}
}

// Start starts a server for one test and removes it at the test's cleanup. If the
// test failed, it logs the end of the server's log.
func Start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	s, err := New(context.Background(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of RabbitMQ's log:\n%s", s.logTail())
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// New makes the node's directories, starts it and waits until a client can log
// in. ctx bounds that, not the life of the server: whoever calls New calls Close.
func New(ctx context.Context, opts ...Option) (*Server, error) {
	bin, err := findBinaries()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "cdcpub-rabbit-")
	if err != nil {
		return nil, fmt.Errorf("make directory for RabbitMQ: %w", err)
	}
	s := &Server{bin: bin, dir: dir, password: testproc.RandomHex(8), config: defaultSettings(),
		plugins: []string{"rabbitmq_consistent_hash_exchange"}}
	for _, opt := range opts {
		opt(s)
	}
	if err := s.startOnFreePorts(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// findBinaries looks for the programs below Debian's wrappers in /usr/sbin: those
// insist on the system's user and directories, these don't.
func findBinaries() (string, error) {
	const variable = "CDCPUB_TEST_RABBIT_BIN"
	bin := os.Getenv(variable)
	if bin == "" {
		bin = "/usr/lib/rabbitmq/bin"
	}
	if _, err := os.Stat(filepath.Join(bin, "rabbitmq-server")); err != nil {
		return "", fmt.Errorf("no RabbitMQ server in %s: run scripts/setup, or set %s", bin, variable)
	}
	return bin, nil
}

// startOnFreePorts tries again when another process took one of the ports between
// the choice of it and its use.
func (s *Server) startOnFreePorts(ctx context.Context) error {
	const attempts = 3
	for n := 1; ; n++ {
		if err := s.choosePorts(); err != nil {
			return err
		}
		if err := s.writeFiles(); err != nil {
			return err
		}
		err := s.start(ctx)
		if err == nil {
			return nil
		}
		err = errors.Join(err, s.Kill(), s.stopEpmd())
		if n == attempts || s.ports.free() {
			return err
		}
	}
}

func (s *Server) choosePorts() error {
	for _, port := range []*int{&s.ports.amqp, &s.ports.dist, &s.ports.epmd, &s.ports.ctl, &s.ports.management} {
		p, err := testproc.FreePort()
		if err != nil {
			return err
		}
		*port = p
	}
	return nil
}

func (p ports) free() bool {
	return testproc.PortFree(p.amqp) && testproc.PortFree(p.dist) && testproc.PortFree(p.epmd)
}

func (s *Server) writeFiles() error {
	config := []string{
		fmt.Sprintf("listeners.tcp.1 = 127.0.0.1:%d", s.ports.amqp),
		"default_user = test",
		"default_pass = " + s.password,
	}
	if slices.Contains(s.plugins, "rabbitmq_management") {
		config = append(config, "management.tcp.ip = 127.0.0.1", fmt.Sprintf("management.tcp.port = %d", s.ports.management))
	}
	for key, value := range s.config {
		config = append(config, key+" = "+value)
	}
	files := []struct {
		name, content string
		mode          os.FileMode
	}{
		{"rabbitmq.conf", strings.Join(config, "\n") + "\n", 0o600},
		{"enabled_plugins", "[" + strings.Join(s.plugins, ",") + "].\n", 0o600},
		// Erlang refuses a cookie that anybody else could read.
		{".erlang.cookie", testproc.RandomHex(16), 0o600},
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(s.dir, f.name), []byte(f.content), f.mode); err != nil {
			return fmt.Errorf("write RabbitMQ's %s: %w", f.name, err)
		}
	}
	return nil
}

// environ is the whole environment of the node and of its command-line tools: what
// the caller or the system's /etc/rabbitmq says must not leak in.
func (s *Server) environ() []string {
	in := func(name string) string { return filepath.Join(s.dir, name) }
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LANG=C.UTF-8",
		"HOME=" + s.dir, // of the cookie
		"RABBITMQ_CONF_ENV_FILE=" + in("none"),
		// Unique within the node's own epmd; localhost needs no look-up of a name.
		"RABBITMQ_NODENAME=cdcpub@localhost",
		"RABBITMQ_NODE_IP_ADDRESS=127.0.0.1",
		fmt.Sprintf("RABBITMQ_NODE_PORT=%d", s.ports.amqp),
		fmt.Sprintf("RABBITMQ_DIST_PORT=%d", s.ports.dist),
		"ERL_EPMD_ADDRESS=127.0.0.1",
		fmt.Sprintf("ERL_EPMD_PORT=%d", s.ports.epmd),
		// Keeps Erlang machines, among them the short-lived one that a booting node
		// starts for this very purpose, from starting an epmd as a daemon.
		"ERL_FLAGS=-start_epmd false",
		fmt.Sprintf("RABBITMQ_CTL_DIST_PORT_MIN=%d", s.ports.ctl),
		fmt.Sprintf("RABBITMQ_CTL_DIST_PORT_MAX=%d", s.ports.ctl+ctlPorts-1),
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_CTL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_MNESIA_BASE=" + in("mnesia"),
		"RABBITMQ_MNESIA_DIR=" + in("mnesia/db"),
		"RABBITMQ_LOG_BASE=" + s.dir,
		"RABBITMQ_LOGS=" + s.logPath(),
		"RABBITMQ_PLUGINS_EXPAND_DIR=" + in("expand"),
		"RABBITMQ_FEATURE_FLAGS_FILE=" + in("feature_flags"),
		"RABBITMQ_PID_FILE=" + in("pid"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + in("enabled_plugins"),
		"RABBITMQ_CONFIG_FILE=" + in("rabbitmq.conf"),
		"RABBITMQ_CONFIG_FILES=" + in("none"),
		"RABBITMQ_ADVANCED_CONFIG_FILE=" + in("none"),
		// Makes the start script exec the Erlang machine, so that the process we
		// started is the broker and a kill hits it.
		"RUNNING_UNDER_SYSTEMD=true",
	}
}

// Start starts a stopped or killed node again, on the same directories and ports,
// and waits until a client can log in.
func (s *Server) Start() error {
	if s.proc.Running() {
		return fmt.Errorf("start RabbitMQ: process %d runs already", s.proc.PID())
	}
	return s.start(context.Background())
}

func (s *Server) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	out, err := os.OpenFile(s.consolePath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open RabbitMQ's output: %w", err)
	}
	defer out.Close()
	if err := s.startEpmd(ctx, out); err != nil {
		return err
	}
	cmd := exec.Command(filepath.Join(s.bin, "rabbitmq-server"))
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = s.dir, s.environ(), out, out
	if s.proc, err = testproc.Start(cmd, syscall.SIGKILL); err != nil {
		return err
	}
	if err := s.proc.Ready(ctx, 100*time.Millisecond, s.probe); err != nil {
		return fmt.Errorf("start RabbitMQ: %w; the end of its log:\n%s", err, s.logTail())
	}
	return nil
}

// startEpmd starts the node's port mapper in the foreground. Left to itself the
// node would start one as a daemon, which outlives it.
func (s *Server) startEpmd(ctx context.Context, out *os.File) error {
	if s.epmd != nil && s.epmd.Running() {
		return nil
	}
	path, err := exec.LookPath("epmd")
	if err != nil {
		return fmt.Errorf("find Erlang's epmd: %w: run scripts/setup", err)
	}
	cmd := exec.Command(path, "-port", strconv.Itoa(s.ports.epmd), "-address", "127.0.0.1")
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = s.dir, s.environ(), out, out
	if s.epmd, err = testproc.Start(cmd, syscall.SIGKILL); err != nil {
		return err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(s.ports.epmd))
	err = s.epmd.Ready(ctx, 5*time.Millisecond, func(ctx context.Context) error {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return fmt.Errorf("start epmd: %w", err)
	}
	return nil
}

func (s *Server) stopEpmd() error {
	if s.epmd == nil {
		return nil
	}
	_, err := s.epmd.Stop(syscall.SIGKILL, stopLimit)
	return err
}

// probe logs in and out again: listeners open at the end of the boot, but a
// connection alone does not say that users and permissions are there.
func (s *Server) probe(context.Context) error {
	conn, err := amqp.DialConfig(s.URL(), amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		return err
	}
	return conn.Close()
}

// URL is where and as whom clients connect: amqp://test:password@127.0.0.1:port/.
func (s *Server) URL() string {
	u := url.URL{Scheme: "amqp", User: url.UserPassword("test", s.password), Host: s.Addr(), Path: "/"}
	return u.String()
}

// ManagementURL is where the management plugin listens, if it is enabled.
func (s *Server) ManagementURL() string {
	return "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(s.ports.management))
}

// Addr is the server's host:port.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.ports.amqp)) }

func (s *Server) logPath() string { return filepath.Join(s.dir, "rabbit.log") }

// consolePath has what goes wrong before logging works.
func (s *Server) consolePath() string { return filepath.Join(s.dir, "console.log") }

func (s *Server) logTail() string {
	return testproc.Tail(s.consolePath(), tailLines) + "\n" + testproc.Tail(s.logPath(), tailLines)
}

// Stop shuts the node down cleanly, waits for that and returns how long it took.
func (s *Server) Stop() (time.Duration, error) {
	took, err := s.proc.Stop(syscall.SIGTERM, stopLimit)
	if err != nil {
		return took, fmt.Errorf("stop RabbitMQ: %w", err)
	}
	return took, nil
}

// Kill ends the node at once, as a crash would, and waits until it is gone.
func (s *Server) Kill() error {
	if s.proc == nil {
		return nil
	}
	if _, err := s.proc.Stop(syscall.SIGKILL, stopLimit); err != nil {
		return fmt.Errorf("kill RabbitMQ: %w", err)
	}
	return nil
}

// Ctl runs rabbitmqctl against the node and returns what it prints. It boots an
// Erlang machine, which takes seconds: declare things over AMQP instead, and use
// it for what AMQP cannot do, such as alarms and permissions.
func (s *Server) Ctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), ctlLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "rabbitmqctl"), args...)
	cmd.Dir, cmd.Env = s.dir, s.environ()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("rabbitmqctl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// CtlScript writes a shell script to path that runs rabbitmqctl against the node,
// for those who call it by name.
func (s *Server) CtlScript(path string) error {
	quote := func(w string) string { return "'" + strings.ReplaceAll(w, "'", `'\''`) + "'" }
	words := []string{"exec", "env", "-i"}
	for _, e := range s.environ() {
		words = append(words, quote(e))
	}
	words = append(words, quote(filepath.Join(s.bin, "rabbitmqctl")), `"$@"`)
	if err := os.WriteFile(path, []byte("#!/bin/sh\ncd "+quote(s.dir)+"\n"+strings.Join(words, " ")+"\n"), 0o700); err != nil {
		return fmt.Errorf("write rabbitmqctl script: %w", err)
	}
	return nil
}

// Close ends the node and its epmd and removes their files.
func (s *Server) Close() error {
	return errors.Join(s.Kill(), s.stopEpmd(), os.RemoveAll(s.dir))
}
