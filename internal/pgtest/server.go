// Package pgtest runs private, real PostgreSQL servers for tests and gives each
// test a database of its own.
//
// Most packages share one server per test process:
//
//	func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }
//
//	func TestX(t *testing.T) {
//		dsn := pgtest.Database(t)
//		...
//	}
//
// A test that stops, kills or configures a server starts its own one with Start.
// The server's programs come from the system's packages: the newest
// /usr/lib/postgresql/*/bin, or the directory that CDCPUB_TEST_PG_BIN names.
package pgtest

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

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

const (
	// startLimit is generous: crash recovery on a busy two-core machine counts too.
	startLimit = 60 * time.Second
	stopLimit  = 60 * time.Second
	tailLines  = 60
)

// Mode says how Stop ends a server.
type Mode syscall.Signal

// The modes, by the signals of the PostgreSQL manual's "Shutting Down the Server".
const (
	// Fast ends sessions and writes a checkpoint, but waits until every walsender
	// has sent its log and its receiver has confirmed it.
	Fast = Mode(syscall.SIGINT)
	// Immediate ends everything at once; the next start goes through recovery.
	Immediate = Mode(syscall.SIGQUIT)
)

// Server is one PostgreSQL server with its own data directory, on its own port
// of 127.0.0.1. Its superuser is postgres, without a password. DSN, Addr and
// DataDir may be called at any time; of the other methods only one at once.
type Server struct {
	bin      string
	dir      string // holds data, the socket and the log
	port     int
	owner    *syscall.Credential // nil: as the test process
	settings []string            // -c name=value ...
	proc     *testproc.Process   // nil: not started yet
}

// Option changes how a server is set up.
type Option func(*Server)

// Setting sets a configuration parameter, such as wal_level, over pgtest's own
// choice and the server's default.
func Setting(name, value string) Option {
	return func(s *Server) { s.settings = append(s.settings, "-c", name+"="+value) }
}

// Default leaves a parameter to the configuration files, as ALTER SYSTEM needs it:
// what pgtest sets on the command line wins over them.
func Default(name string) Option {
	return func(s *Server) {
		for i := 1; i < len(s.settings); i++ {
			if strings.HasPrefix(s.settings[i], name+"=") {
				s.settings = slices.Delete(s.settings, i-1, i+1)
			}
		}
	}
}

// defaultSettings makes a small, quick server that can do logical replication.
// Without fsync, a kill loses nothing: the kernel keeps what was written. Small
// buffers, a small log and little memory for decoding bring checkpoints, segment
// switches and spilled transactions into ordinary tests. wal_sender_timeout keeps
// the server's default, since clients are to choose theirs.
func defaultSettings() []string {
	var args []string
	for _, setting := range []string{
		"listen_addresses=127.0.0.1",
		"wal_level=logical",
		"max_wal_senders=20",
		"max_replication_slots=20",
		"max_prepared_transactions=10",
		"fsync=off",
		"shared_buffers=32MB",
		"max_wal_size=64MB",
		"logical_decoding_work_mem=64kB",
		"log_replication_commands=on",
		"log_line_prefix=%m [%p] %d ",
		// In the data directory rather than /dev/shm, where a killed server's
		// segments would stay for ever.
		"dynamic_shared_memory_type=mmap",
	} {
		args = append(args, "-c", setting)
	}
	return args
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
			t.Logf("the end of PostgreSQL's log:\n%s", s.logTail())
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// New makes a data directory, starts a server on it and waits until it answers
// SQL. ctx bounds that, not the life of the server: whoever calls New calls Close.
func New(ctx context.Context, opts ...Option) (*Server, error) {
	bin, err := findBinaries()
	if err != nil {
		return nil, err
	}
	owner, err := serverOwner()
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, owner: owner, settings: defaultSettings()}
	for _, opt := range opts {
		opt(s)
	}
	if s.dir, err = makeDir(owner); err != nil {
		return nil, err
	}
	if err := s.initdb(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if err := s.startOnFreePort(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Server) initdb(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "initdb"), "-D", s.DataDir(), "-U", "postgres",
		"-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
	s.prepare(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	return nil
}

// startOnFreePort tries again when another process took the port between the
// choice of it and the server's bind.
func (s *Server) startOnFreePort(ctx context.Context) error {
	const attempts = 5
	for n := 1; ; n++ {
		port, err := testproc.FreePort()
		if err != nil {
			return err
		}
		s.port = port
		err = s.start(ctx)
		if err == nil || s.proc == nil || s.proc.Running() || testproc.PortFree(port) || n == attempts {
			return err
		}
	}
}

// Start starts a stopped or killed server again, on the same data and port, and
// waits until it answers SQL.
func (s *Server) Start() error {
	if s.proc.Running() {
		return fmt.Errorf("start PostgreSQL: process %d runs already", s.proc.PID())
	}
	return s.start(context.Background())
}

func (s *Server) start(ctx context.Context) error {
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open PostgreSQL's log: %w", err)
	}
	defer log.Close()
	args := append([]string{"-D", s.DataDir(), "-p", strconv.Itoa(s.port), "-k", s.dir}, s.settings...)
	cmd := exec.Command(filepath.Join(s.bin, "postgres"), args...)
	cmd.Stdout, cmd.Stderr = log, log
	s.prepare(cmd)
	// An immediate shutdown rather than a kill, so that the server takes its
	// children and its System V segment with it.
	if s.proc, err = testproc.Start(cmd, syscall.SIGQUIT); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if err := s.proc.Ready(ctx, 20*time.Millisecond, s.probe); err != nil {
		return fmt.Errorf("start PostgreSQL: %w; the end of its log:\n%s", err, s.logTail())
	}
	return nil
}

// probe logs in and out again, which a server that still recovers refuses.
func (s *Server) probe(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.DSN("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// prepare sets what the server's programs have in common. They refuse to run as
// root, and read the locale and time zone of a new cluster from the environment.
func (s *Server) prepare(cmd *exec.Cmd) {
	cmd.Dir = s.dir
	cmd.Env = []string{"LC_ALL=C", "TZ=UTC", "PATH=" + s.bin + ":/usr/bin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.owner}
}

// DSN is the URL of a database on the server.
func (s *Server) DSN(database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.User("postgres"), Host: s.Addr(), Path: "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Addr is the server's host:port.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// DataDir is the server's data directory; its files belong to the user that the
// server runs as.
func (s *Server) DataDir() string { return filepath.Join(s.dir, "data") }

func (s *Server) logPath() string { return filepath.Join(s.dir, "log") }

func (s *Server) logTail() string { return testproc.Tail(s.logPath(), tailLines) }

// Stop ends the server in the given mode, waits for that and returns how long it
// took. A server that does not end within a minute is an error, and keeps running.
func (s *Server) Stop(mode Mode) (time.Duration, error) {
	took, err := s.proc.Stop(syscall.Signal(mode), stopLimit)
	if err != nil {
		return took, fmt.Errorf("stop PostgreSQL: %w", err)
	}
	return took, nil
}

// Kill ends the server and all its processes at once, as a crash of the machine
// would, and waits until they are gone.
func (s *Server) Kill() error {
	if err := killTree(s.proc); err != nil {
		return fmt.Errorf("kill PostgreSQL: %w", err)
	}
	return nil
}

// Close ends the server and removes its files.
func (s *Server) Close() error {
	var err error
	if s.proc != nil && s.proc.Running() {
		// Immediate frees the System V segment, a kill does not.
		if _, stopErr := s.proc.Stop(syscall.SIGQUIT, 10*time.Second); stopErr != nil {
			err = s.Kill()
		}
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}
