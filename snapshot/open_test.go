package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/internal/faultproxy"
	"github.com/cdcpub/cdcpub/internal/pgtest"
)

func TestFreshSnapshotIsTakenAtOpen(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, insertRows(1, 3), "CREATE TABLE second (LIKE outbox INCLUDING ALL)")
	cfg.Tables = append(cfg.Tables, Table{Name: "public.second"})
	s := open(t, cfg)
	// Open hands its session over to a goroutine that queries at once: only begin
	// alone shows that nobody has to.
	conn, err := connect(t.Context(), cfg.Server)
	if err != nil {
		t.Fatal(err)
	}
	defer closeConn(conn)
	if err := begin(t.Context(), conn, cfg); err != nil {
		t.Fatal(err)
	}
	pgtest.Exec(t, dsn, insertRows(4, 6), "INSERT INTO second VALUES (7)", "DELETE FROM outbox WHERE id = 1")
	if got := ids(readAll(t, s)); got != "1 2 3" {
		t.Errorf("rows %s, want those that were there at Open: 1 2 3", got)
	}
	if rows, err := query(t.Context(), conn, "SELECT count(*) FROM public.outbox"); err != nil || string(rows[0][0]) != "3" {
		t.Errorf("begin left the snapshot to the first query: it counts %s rows, %v", rows, err)
	}
}

func TestOpenRefusesWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	good := configure(t, dsn)
	for name, change := range map[string]func(*Config){
		"no server":                    func(c *Config) { c.Server = nil },
		"no consistent point":          func(c *Config) { c.Point = 0 },
		"no chunk":                     func(c *Config) { c.ChunkRows = 0 },
		"a table that is not there":    func(c *Config) { c.Tables = []Table{{Name: "public.nonsense"}} },
		"a snapshot that is gone":      func(c *Config) { c.Exported = "00000003-00000002-1" },
		"a snapshot with a quote":      func(c *Config) { c.Exported = "'; DROP TABLE outbox; --" },
		"a server that is not there":   func(c *Config) { c.Server = server(t, "postgres://postgres@127.0.0.1:1/x") },
		"a database that is not there": func(c *Config) { c.Server = server(t, strings.Replace(dsn, "/t_", "/u_", 1)) },
	} {
		cfg := good
		change(&cfg)
		if s, err := Open(t.Context(), cfg); err == nil {
			s.Close()
			t.Errorf("opened with %s", name)
		}
	}
}

// An old snapshot would find the table empty.
func TestTablesCannotBeTruncatedUnderTheSnapshot(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, insertRows(1, 3), "CREATE TABLE second (LIKE outbox INCLUDING ALL)")
	cfg.Tables = append(cfg.Tables, Table{Name: "public.second"})
	open(t, cfg)
	conn := pgtest.Connect(t, dsn)
	_, err := conn.Exec(t.Context(), "SET lock_timeout = '50ms'; TRUNCATE second")
	var pe *pgconn.PgError
	if !errors.As(err, &pe) || pe.Code != "55P03" {
		t.Errorf("TRUNCATE of a table that is still to be read: %v", err)
	}
}

// A fresh snapshot of a standby may lack rows that the slot has behind it.
func TestOpenRefusesAStandby(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	cfg := configure(t, srv.DSN("postgres"), insertRows(1, 3))
	if _, err := srv.Stop(pgtest.Fast); err != nil {
		t.Fatal(err)
	}
	// Without a primary it replays its own log and waits for more.
	if err := os.WriteFile(filepath.Join(srv.DataDir(), "standby.signal"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := srv.Start(); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), cfg)
	if err == nil {
		s.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "standby") {
		t.Errorf("opened on a standby: %v", err)
	}
}

func TestOpenEndsWithItsContextWhenTheServerIsSilent(t *testing.T) {
	t.Parallel()
	good := configure(t, pgtest.Database(t))
	for name, silence := range map[string]func(*pgconn.Config, *faultproxy.Proxy){
		"while it connects": func(_ *pgconn.Config, p *faultproxy.Proxy) { p.Stall() },
		"at the first statement": func(c *pgconn.Config, p *faultproxy.Proxy) {
			c.AfterConnect = func(context.Context, *pgconn.PgConn) error { p.Stall(); return nil }
		},
	} {
		cfg := good
		cfg.Server = good.Server.Copy()
		proxy := faultproxy.Start(t, fmt.Sprintf("%s:%d", good.Server.Host, good.Server.Port))
		addr := netip.MustParseAddrPort(proxy.Addr())
		cfg.Server.Host, cfg.Server.Port = addr.Addr().String(), addr.Port()
		silence(cfg.Server, proxy)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		begin := time.Now()
		s, err := Open(ctx, cfg)
		cancel()
		if err == nil {
			s.Close()
		}
		if took := time.Since(begin); err == nil || took > 2*time.Second {
			t.Errorf("%s: Open took %s and said %v", name, took, err)
		}
	}
}

func TestServerConfigurationStaysTheCallers(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t))
	want := maps.Clone(cfg.Server.RuntimeParams)
	open(t, cfg)
	if d := cmp.Diff(want, cfg.Server.RuntimeParams); d != "" {
		t.Errorf("parameters (-before +after Open):\n%s", d)
	}
}
