package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// A configuration that cannot work is one clear line and the documented exit
// code, and leaves nothing half-made behind.
func TestWrongConfigurationIsUsageError(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		file string
		env  map[string]string
		args []string
		want string
	}{
		"an unknown key names the nearest known one": {
			file: "source:\n  slott: x\n", args: []string{"run"}, want: "source.slot"},
		"an unknown variable names the nearest known one": {
			env: map[string]string{"CDCPUB_SOURCE_SLOTT": "x"}, args: []string{"run"}, want: "CDCPUB_SOURCE_SLOT"},
		"a DSN that is none does not show its password": {
			env: map[string]string{"CDCPUB_SOURCE_DSN": "postgres://u:s3cret@:::/x"}, args: []string{"run"}, want: "source.dsn"},
		"a broker URL of another kind": {
			env: map[string]string{"CDCPUB_PUBLISH_URL": "http://u:s3cret@localhost"}, args: []string{"run"}, want: "publish.urls"},
		"a broker URL with a parameter that means nothing": {
			env: map[string]string{"CDCPUB_PUBLISH_URL": "amqp://u:s3cret@localhost/?hartbeat=5"}, args: []string{"run"}, want: "unknown query parameter"},
		"an option that is not built yet": {
			file: "relay:\n  on_unroutable: park\n", args: []string{"run"}, want: "not built yet"},
		"a key that is not built yet": {
			file: "cleanup:\n  enabled: true\n", args: []string{"run"}, want: "not built yet"},
		"a template with an unknown placeholder": {
			env: map[string]string{"CDCPUB_ROUTER_ROUTING_KEY": "{aggregate_idd}"}, args: []string{"run"}, want: "aggregate_id"},
		"an unknown flag":       {args: []string{"run", "--hurry"}, want: "--hurry"},
		"an unknown subcommand": {args: []string{"fly"}, want: "fly"},
		"a question without a terminal": {
			args: []string{"teardown"}, want: "--yes"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newConnector(t, "postgres://postgres@127.0.0.1:1/x?sslmode=disable", "amqp://127.0.0.1:1/", "wrong")
			for k, v := range tc.env {
				c.env[k] = v
			}
			args := tc.args
			if tc.file != "" {
				path := filepath.Join(t.TempDir(), "cdcpub.yml")
				if err := os.WriteFile(path, []byte(tc.file), 0o600); err != nil {
					t.Fatal(err)
				}
				args = append(args, "--config", path)
			}
			stdout, stderr, code := c.cli(args...)
			if code != 2 || !strings.Contains(stderr, tc.want) || strings.Count(stderr, "\n") != 1 || stdout != "" {
				t.Errorf("exit %d, want 2 and one line with %q:\n%s%s", code, tc.want, stdout, stderr)
			}
			if strings.Contains(stderr, "s3cret") {
				t.Errorf("the password is shown: %s", stderr)
			}
			if _, err := os.Stat(c.env["CDCPUB_OFFSETS_PATH"]); !os.IsNotExist(err) {
				t.Errorf("a state directory was made: %v", err)
			}
		})
	}
}

// What only the server can tell is a refusal: run stays up, live, not ready and
// says why; with --exit-on-refusal it ends with a code.
func TestRefusals(t *testing.T) {
	t.Parallel()
	pg := pgtest.Start(t)
	replica := pgtest.Start(t, pgtest.Setting("wal_level", "replica"))
	url := rabbittest.URL(t)
	for name, tc := range map[string]struct {
		server  *pgtest.Server
		prepare func(t *testing.T, c *connector, dsn string)
		code    string
		exit    int
		want    string
		left    bool // a slot of our name is there before and after
	}{
		"wal_level is replica": {
			server: replica, code: "setup", exit: 2, want: "wal_level"},
		"there is no table": {
			server: pg, code: "setup", exit: 2, want: "public.outbox does not exist"},
		"there is no publication": {
			server: pg, prepare: func(t *testing.T, c *connector, dsn string) {
				c.must("init", "--create-table")
				pgtest.Exec(t, dsn, "DROP PUBLICATION "+c.env["CDCPUB_SOURCE_PUBLICATION"])
			}, code: "setup", exit: 2, want: "cdcpub init"},
		"the slot belongs to another plugin": {
			server: pg, prepare: func(t *testing.T, c *connector, dsn string) {
				c.must("init", "--create-table")
				pgtest.Exec(t, dsn, "SELECT pg_create_logical_replication_slot('"+c.env["CDCPUB_SOURCE_SLOT"]+"', 'test_decoding')")
			}, code: "setup", exit: 2, want: "test_decoding", left: true},
		"a slot exists and nothing is saved": {
			server: pg, prepare: func(t *testing.T, c *connector, dsn string) {
				c.must("init", "--create-table")
				pgtest.Exec(t, dsn, "SELECT pg_create_logical_replication_slot('"+c.env["CDCPUB_SOURCE_SLOT"]+"', 'pgoutput')")
			}, code: "gap", exit: 3, want: "nothing is saved here", left: true},
		"the slot is gone": {
			server: pg, prepare: func(t *testing.T, c *connector, dsn string) {
				c.must("init", "--create-table")
				c.streamOnce()
				pgtest.Exec(t, dsn, "SELECT pg_drop_replication_slot('"+c.env["CDCPUB_SOURCE_SLOT"]+"')")
			}, code: "slot-lost", exit: 4, want: "events after it are lost"},
		"somebody else moved the slot": {
			server: pg, prepare: func(t *testing.T, c *connector, dsn string) {
				c.must("init", "--create-table")
				c.streamOnce()
				pgtest.Exec(t, dsn, "CREATE TABLE moves (x int)", "INSERT INTO moves VALUES (1)",
					"SELECT pg_replication_slot_advance('"+c.env["CDCPUB_SOURCE_SLOT"]+"', pg_current_wal_lsn())")
			}, code: "gap", exit: 3, want: "beyond the saved position", left: true},
		"the connector would be a synchronous standby": {
			server: pg, prepare: func(t *testing.T, c *connector, dsn string) {
				c.must("init", "--create-table")
				// Commits do not wait for the standby, or this test's own would for ever.
				pgtest.Exec(t, dsn, "ALTER SYSTEM SET synchronous_commit = local",
					"ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (cdcpub, other)'", "SELECT pg_reload_conf()")
				t.Cleanup(func() {
					pgtest.Exec(t, dsn, "ALTER SYSTEM RESET synchronous_standby_names", "ALTER SYSTEM RESET synchronous_commit", "SELECT pg_reload_conf()")
				})
				eventually(t, 10*time.Second, "the setting is in force", func() bool {
					return pgtest.Query[string](t, dsn, "SHOW synchronous_standby_names") != ""
				})
			}, code: "setup", exit: 2, want: "synchronous"},
	} {
		t.Run(name, func(t *testing.T) {
			slot := rabbittest.Name(t)
			db := "db_" + slot
			pgtest.Exec(t, tc.server.DSN("postgres"), "CREATE DATABASE "+db)
			dsn := tc.server.DSN(db)
			c := newConnector(t, dsn, url, slot)
			if tc.prepare != nil {
				tc.prepare(t, c, dsn)
			}
			_, stderr, code := c.cli("run", "--exit-on-refusal")
			lines := strings.Split(strings.TrimSpace(stderr), "\n")
			if last := lines[len(lines)-1]; code != tc.exit || !strings.HasPrefix(last, "cdcpub: refused: ") || !strings.Contains(last, tc.want) {
				t.Errorf("exit %d, want %d and a last line with %q:\n%s", code, tc.exit, tc.want, stderr)
			}
			c.start()
			eventually(t, 10*time.Second, "run stays up refused", func() bool {
				s := c.status()
				return s.State == "refused" && !s.Ready && s.Refusal != nil && s.Refusal.Code == tc.code && strings.Contains(s.Reason+s.Refusal.Hint, tc.want)
			})
			c.stop()
			slots := pgtest.Query[int](t, dsn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", slot)
			if tc.left != (slots == 1) {
				t.Errorf("%d slots are left", slots)
			}
		})
	}
}

// streamOnce runs the connector until it streams and stops it.
func (c *connector) streamOnce() {
	c.t.Helper()
	c.start()
	eventually(c.t, time.Minute, "the connector streams", func() bool { s := c.status(); return s.Ready && s.State == "streaming" })
	c.stop()
}

// A refusal ends by itself once its cause is gone.
func TestRefusalEndsWithItsCause(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.start()
	eventually(t, 10*time.Second, "run refuses", func() bool { return c.status().State == "refused" })
	// The state directory is free meanwhile.
	c.must("init", "--create-table")
	eventually(t, 20*time.Second, "run goes on", func() bool { s := c.status(); return s.Ready && s.State == "streaming" && s.Refusal == nil })
	c.stop()
	c.must("teardown", "--yes")
	if n := pgtest.Query[int](t, dsn, "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1) + (SELECT count(*) FROM pg_publication)", name); n != 0 {
		t.Errorf("teardown left %d slots and publications", n)
	}
	if _, err := os.Stat(c.env["CDCPUB_OFFSETS_PATH"]); !os.IsNotExist(err) {
		t.Errorf("teardown left the state: %v", err)
	}
}

func TestInitWithoutTheRightToCreateThePublication(t *testing.T) {
	t.Parallel()
	dsn, name := pgtest.Database(t), rabbittest.Name(t)
	c := newConnector(t, dsn, "amqp://127.0.0.1:1/", name)
	c.must("init", "--create-table")
	pgtest.Exec(t, dsn, "DROP PUBLICATION "+name, "DROP ROLE IF EXISTS cdcpub_poor", "CREATE ROLE cdcpub_poor LOGIN REPLICATION")
	t.Cleanup(func() { pgtest.Exec(t, dsn, "DROP ROLE cdcpub_poor") })
	c.env["CDCPUB_SOURCE_DSN"] = strings.Replace(dsn, "postgres@", "cdcpub_poor@", 1)
	_, stderr, code := c.cli("init")
	if code != 1 || !strings.Contains(stderr, "permission denied") || !strings.Contains(stderr, "--print-sql") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("exit %d:\n%s", code, stderr)
	}
	sql, _, code := c.cli("init", "--print-sql")
	if code != 0 || !strings.Contains(sql, "CREATE PUBLICATION") {
		t.Fatalf("exit %d: %s", code, sql)
	}
	pgtest.Exec(t, dsn, sql)
	c.must("init")
}

// The slot is not created before the rows older than it can be read.
func TestRoleWithoutTheRightToReadOldRowsIsRefused(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	role := "blind_" + strings.TrimPrefix(name, "t_")
	pgtest.Exec(t, dsn, "CREATE ROLE "+role+" LOGIN REPLICATION")
	t.Cleanup(func() { pgtest.Exec(t, dsn, "DROP OWNED BY "+role, "DROP ROLE "+role) })
	c.env["CDCPUB_SOURCE_DSN"] = strings.Replace(dsn, "postgres@", role+"@", 1)
	refused := func(want string) {
		t.Helper()
		_, stderr, code := c.cli("run", "--exit-on-refusal")
		if code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("exit %d, want 2 and %q:\n%s", code, want, stderr)
		}
		if n := pgtest.Query[int](t, dsn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", name); n != 0 {
			t.Error("the slot was created")
		}
	}
	refused("GRANT SELECT")
	pgtest.Exec(t, dsn, "GRANT SELECT ON outbox TO "+role, "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
	refused("row-level security")
	pgtest.Exec(t, dsn, "ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
	c.streamOnce()
}

func TestTheSecondProcessWithOneStateDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
	second := newConnector(t, dsn, url, name)
	second.env["CDCPUB_OFFSETS_PATH"] = c.env["CDCPUB_OFFSETS_PATH"]
	if _, stderr, code := second.cli("run", "--exit-on-refusal"); code != 2 || !strings.Contains(stderr, "process") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if _, stderr, code := second.cli("teardown", "--yes"); code == 0 {
		t.Errorf("teardown of a running connector: exit 0: %s", stderr)
	}
	if !c.status().Ready {
		t.Error("the first process was disturbed")
	}
}
