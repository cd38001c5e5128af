package pgtest_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/cdcpub/cdcpub/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

func TestServerKeepsDataWhateverEndsIt(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t, pgtest.Setting("application_name", "pgtest"))
	dsn, addr := s.DSN("postgres"), s.Addr()
	pgtest.Exec(t, dsn, "CREATE TABLE kept (n int)", "CHECKPOINT")
	ends := []struct {
		name string
		end  func() error
	}{
		{"a fast shutdown", func() error { _, err := s.Stop(pgtest.Fast); return err }},
		{"an immediate shutdown", func() error { _, err := s.Stop(pgtest.Immediate); return err }},
		{"a crash", s.Kill},
		{"a crash right after another", s.Kill},
	}
	for n, e := range ends {
		pgtest.Exec(t, dsn, "INSERT INTO kept VALUES (1)")
		if err := e.end(); err != nil {
			t.Fatalf("%s: %v", e.name, err)
		}
		if conn, err := pgx.Connect(context.Background(), dsn); err == nil {
			_ = conn.Close(context.Background())
			t.Fatalf("%s: the server still answers", e.name)
		}
		if err := s.Start(); err != nil {
			t.Fatalf("after %s: %v", e.name, err)
		}
		if s.Addr() != addr {
			t.Fatalf("after %s: address %s, was %s", e.name, s.Addr(), addr)
		}
		if got := pgtest.Query[int](t, dsn, "SELECT count(*)::int FROM kept"); got != n+1 {
			t.Fatalf("after %s: %d rows, want %d", e.name, got, n+1)
		}
	}
}

func TestStartOfARunningServerIsRefused(t *testing.T) {
	t.Parallel()
	if err := pgtest.Start(t).Start(); err == nil {
		t.Fatal("a running server was started again")
	}
}

func TestSettingWinsOverTheDefault(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t, pgtest.Setting("wal_level", "replica"))
	if got := pgtest.Query[string](t, s.DSN("postgres"), "SHOW wal_level"); got != "replica" {
		t.Errorf("wal_level is %q", got)
	}
}

func TestServerThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	s, err := pgtest.New(t.Context(), pgtest.Setting("no_such_parameter", "1"))
	if err == nil {
		t.Fatal("started", s.Close())
	}
	if !strings.Contains(err.Error(), "no_such_parameter") {
		t.Errorf("error does not show the server's log: %v", err)
	}
}

func TestMissingServerNamesTheVariableThatPointsNowhere(t *testing.T) {
	t.Setenv("CDCPUB_TEST_PG_BIN", t.TempDir())
	_, err := pgtest.New(t.Context())
	if err == nil || !strings.Contains(err.Error(), "CDCPUB_TEST_PG_BIN") {
		t.Errorf("got %v", err)
	}
}

func TestDatabaseIsFreshAndGoesAwayWithSlotsInUse(t *testing.T) {
	t.Parallel()
	var dsn string
	outer := t
	t.Run("user", func(t *testing.T) {
		dsn = pgtest.Database(t)
		if other := pgtest.Database(t); other == dsn {
			t.Fatalf("the same database twice: %s", dsn)
		}
		conn := pgtest.Connect(t, dsn)
		if _, err := conn.Exec(t.Context(), "SELECT pg_create_logical_replication_slot('pgtest_idle', 'pgoutput')"); err != nil {
			t.Fatal(err)
		}
		pgtest.Exec(t, dsn, "SELECT pg_create_logical_replication_slot('pgtest_busy', 'test_decoding')")
		startReplication(outer, dsn, "pgtest_busy")
	})
	admin := os.Getenv("CDCPUB_TEST_POSTGRES")
	if got := pgtest.Query[int](t, admin, "SELECT count(*)::int FROM pg_replication_slots WHERE slot_name LIKE 'pgtest_%'"); got != 0 {
		t.Errorf("%d slots left", got)
	}
	name := dsn[strings.LastIndex(dsn, "/")+1 : strings.Index(dsn, "?")]
	if got := pgtest.Query[int](t, admin, "SELECT count(*)::int FROM pg_database WHERE datname = $1", name); got != 0 {
		t.Errorf("database %s is left", name)
	}
}

// startReplication occupies slot until t ends or the server takes it away.
func startReplication(t *testing.T, dsn, slot string) {
	t.Helper()
	conn := pgtest.Connect(t, dsn+"&replication=database").PgConn()
	conn.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + slot + " LOGICAL 0/0"})
	if err := conn.Frontend().Flush(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := conn.ReceiveMessage(ctx); err != nil {
		t.Fatal(err)
	}
}
