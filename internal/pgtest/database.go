package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

// serverVariable names the server that tests share.
const serverVariable = "CDCPUB_TEST_POSTGRES"

// queryLimit bounds each helper. They do not use the test's own context, which is
// over by the time cleanups run.
const queryLimit = 60 * time.Second

// Main is for TestMain: it runs the tests of m with a shared server, then fails
// them if they left goroutines behind. It returns the exit code.
func Main(m testproc.Runner) int { return testproc.RunWithoutLeaks(Wrap(m)) }

// Wrap returns m with a shared server around it: the one that CDCPUB_TEST_POSTGRES
// names, or one that lives as long as m runs. It is for test processes that need
// several kinds of servers, where only the outermost looks for leaks.
func Wrap(m testproc.Runner) testproc.Runner {
	return testproc.RunnerFunc(func() int {
		if os.Getenv(serverVariable) != "" {
			return m.Run()
		}
		code, err := runWithServer(m)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	})
}

func runWithServer(m testproc.Runner) (int, error) {
	s, err := New(context.Background())
	if err != nil {
		return 1, err
	}
	if err := os.Setenv(serverVariable, s.DSN("postgres")); err != nil {
		return 1, errors.Join(err, s.Close())
	}
	code := m.Run()
	if code != 0 {
		fmt.Fprintf(os.Stderr, "the end of PostgreSQL's log:\n%s\n", s.logTail())
	}
	return code, s.Close()
}

// Database creates an empty database on the shared server and returns its DSN. At
// the test's cleanup the database goes, with its sessions and replication slots.
func Database(t testing.TB) string {
	t.Helper()
	admin := os.Getenv(serverVariable)
	if admin == "" {
		t.Fatalf("%s is not set: TestMain must call pgtest.Main", serverVariable)
	}
	u, err := url.Parse(admin)
	if err != nil {
		t.Fatalf("parse %s: %v", serverVariable, err)
	}
	name := testproc.UniqueName(t.Name())
	Exec(t, admin, "CREATE DATABASE "+name)
	t.Cleanup(func() {
		if err := dropDatabase(admin, name); err != nil {
			t.Errorf("drop database %s: %v", name, err)
		}
	})
	u.Path = "/" + name
	return u.String()
}

func dropDatabase(admin, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), queryLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	// First, or a client that reconnects would take its slot again.
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+name+" WITH ALLOW_CONNECTIONS false"); err != nil {
		return err
	}
	if err := dropSlots(ctx, conn, name); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
	return err
}

// dropSlots drops the database's replication slots, without which it cannot be
// dropped itself. A slot stays active until its walsender has noticed that it was
// terminated, and temporary slots go with their sessions.
func dropSlots(ctx context.Context, conn *pgx.Conn, database string) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		_, err := conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1`, database)
		if err != nil {
			return fmt.Errorf("terminate sessions: %w", err)
		}
		// A slot that became active since its row was read makes this fail: the next round tries again.
		_, dropErr := conn.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
			WHERE database = $1 AND NOT active AND NOT temporary`, database)
		var left int
		if err := conn.QueryRow(ctx, `SELECT count(*) FROM pg_replication_slots WHERE database = $1`, database).Scan(&left); err != nil {
			return fmt.Errorf("count replication slots: %w", err)
		}
		if left == 0 {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("drop the last %d replication slots: %w", left, errors.Join(ctx.Err(), dropErr))
		}
	}
}

// Connect opens a connection that is closed at the test's cleanup.
func Connect(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), queryLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeConn(conn) })
	return conn
}

// closeConn closes conn, politely for at most a second: the server may be stopped.
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// Exec runs statements one after another, each in a transaction of its own unless
// it says otherwise, on a connection that it closes again.
func Exec(t testing.TB, dsn string, statements ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), queryLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer closeConn(conn)
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatalf("execute %q: %v", sql, err)
		}
	}
}

// Query returns the first column of the query's first row, on a connection that it
// closes again. No row at all fails the test.
func Query[T any](t testing.TB, dsn, sql string, args ...any) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), queryLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer closeConn(conn)
	var value T
	if err := conn.QueryRow(ctx, sql, args...).Scan(&value); err != nil {
		t.Fatalf("query %q: %v", sql, err)
	}
	return value
}
