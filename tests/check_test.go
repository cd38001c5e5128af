package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// finding is what the tests read of check's JSON.
type finding struct {
	Check, Level, Text, As, Note string
	Fix                          []string
}

// shell runs a script as an operator would who has set the connector's variables:
// cdcpub is the built command.
func (c *connector) shell(script string) (stdout, stderr string, code int) {
	c.t.Helper()
	return c.shellWith(script, strings.NewReader(""))
}

// shellWith has the operator type something too.
func (c *connector) shellWith(script string, typed io.Reader) (stdout, stderr string, code int) {
	c.t.Helper()
	bin := c.t.TempDir()
	if err := os.Symlink(os.Getenv(binaryVariable), filepath.Join(bin, "cdcpub")); err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = c.t.TempDir()
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = typed, &out, &errs
	for k, v := range c.env {
		if k == "PATH" {
			v = bin + ":" + v
		}
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		c.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// check runs commands and, in the same shell, check. It returns what failed.
func (c *connector) check(commands ...string) (failed []finding, output string) {
	c.t.Helper()
	return c.findings(strings.Join(append([]string{"set -e", "{ :", strings.Join(commands, "\n"), "} >&2", "cdcpub check --output json"}, ""), "\n"))
}

// findings runs a script whose output is check's JSON.
func (c *connector) findings(script string) (failed []finding, output string) {
	c.t.Helper()
	stdout, stderr, code := c.shell(script)
	var all []finding
	if err := json.Unmarshal([]byte(stdout), &all); err != nil {
		c.t.Fatalf("%s: exit %d, %v:\n%s%s", script, code, err, stdout, stderr)
	}
	for _, f := range all {
		if f.Level == "fail" {
			failed = append(failed, f)
		}
		output += fmt.Sprintf("%s %s: %s\n", f.Level, f.Check, f.Text)
	}
	if (code == 0) != (len(failed) == 0) {
		c.t.Errorf("check: exit %d with %d failures: %s", code, len(failed), stderr)
	}
	return failed, output
}

// sourceFault is something wrong with the database or the configuration.
type sourceFault struct {
	plant func(t *testing.T, c *connector, dsn string)
	check string   // the line of check that has to name it; %s is the slot's name
	says  []string // in its text
}

func ready(t *testing.T, c *connector, _ string) { t.Helper(); c.must("init", "--create-table") }

// plantSQL makes everything ready and then executes statements. {name} is the
// connector's name.
func plantSQL(statements ...string) func(t *testing.T, c *connector, dsn string) {
	return func(t *testing.T, c *connector, dsn string) {
		t.Helper()
		ready(t, c, dsn)
		for _, s := range statements {
			pgtest.Exec(t, dsn, strings.ReplaceAll(s, "{name}", c.env["CDCPUB_SOURCE_SLOT"]))
		}
	}
}

// asRole has the connector log in as a role of its own, with the given options
// and statements that grant it something.
func asRole(options string, grants ...string) func(t *testing.T, c *connector, dsn string) {
	return func(t *testing.T, c *connector, dsn string) {
		t.Helper()
		ready(t, c, dsn)
		role := "role_" + c.env["CDCPUB_SOURCE_SLOT"]
		pgtest.Exec(t, dsn, "CREATE ROLE "+role+" LOGIN "+options)
		t.Cleanup(func() { pgtest.Exec(t, dsn, "DROP OWNED BY "+role, "DROP ROLE "+role) })
		for _, g := range grants {
			pgtest.Exec(t, dsn, strings.ReplaceAll(g, "{role}", role))
		}
		c.env["CDCPUB_SOURCE_DSN"] = strings.Replace(dsn, "postgres@", role+"@", 1)
	}
}

func sourceFaults() map[string]sourceFault {
	return map[string]sourceFault{
		"there is no table": {plant: func(*testing.T, *connector, string) {}, check: "table public.outbox", says: []string{"does not exist"}},
		"the table is unlogged": {
			// In the publication it could not be made unlogged.
			plant: plantSQL("DROP PUBLICATION {name}", "ALTER TABLE outbox SET UNLOGGED", "CREATE PUBLICATION {name} FOR ALL TABLES WITH (publish = 'insert')"),
			check: "table public.outbox", says: []string{"unlogged"}},
		"there is no publication": {plant: plantSQL("DROP PUBLICATION {name}"), check: "publication %s", says: []string{"does not exist"}},
		"the publication has no inserts": {
			plant: plantSQL("ALTER PUBLICATION {name} SET (publish = 'delete')"), check: "publication %s", says: []string{"does not publish inserts"}},
		"the publication has another table and no slot exists": {
			plant: plantSQL("CREATE TABLE other (LIKE outbox INCLUDING ALL)", "ALTER PUBLICATION {name} SET TABLE other"),
			check: "publication %s", says: []string{"serves public.other, not public.outbox"}},
		"the publication has a row filter": {
			plant: plantSQL("ALTER PUBLICATION {name} SET TABLE outbox WHERE (type <> 'x')"), check: "publication %s", says: []string{"row filter"}},
		"the publication has the partitions under their own names": {
			plant: plantSQL("DROP TABLE outbox", "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, version bigint) PARTITION BY HASH (id)",
				"CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (modulus 1, remainder 0)",
				"ALTER PUBLICATION {name} SET TABLE outbox", "ALTER PUBLICATION {name} SET (publish_via_partition_root = false)"),
			check: "publication %s", says: []string{"partitions of public.outbox"}},
		"the slot is another plugin's": {
			plant: plantSQL("SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')"), check: "slot %s", says: []string{"test_decoding"}},
		"the slot is physical": {
			plant: plantSQL("SELECT pg_create_physical_replication_slot('{name}')"), check: "slot %s", says: []string{"physical"}},
		"the slot and the publication serve another table": {
			plant: plantSQL("CREATE TABLE orders_outbox (LIKE outbox INCLUDING ALL)", "ALTER PUBLICATION {name} SET TABLE orders_outbox",
				"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"), check: "slot %s", says: []string{"serves public.orders_outbox"}},
		"the role may not replicate": {
			plant: asRole("", "GRANT SELECT ON outbox TO {role}"), check: "role", says: []string{"may not read from a replication slot"}},
		"the role may not read the table": {
			plant: asRole("REPLICATION"), check: "old rows", says: []string{"may not read the old rows"}},
		"the role may not use the schema": {
			plant: asRole("REPLICATION", "GRANT SELECT ON outbox TO {role}", "REVOKE USAGE ON SCHEMA public FROM PUBLIC"), check: "old rows", says: []string{"may not read the old rows"}},
		"row-level security hides rows": {
			plant: asRole("REPLICATION", "GRANT SELECT ON outbox TO {role}", "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY"),
			check: "old rows", says: []string{"row-level security"}},
		"old rows are ordered by a column that is not there": {
			plant: func(t *testing.T, c *connector, dsn string) {
				t.Helper()
				ready(t, c, dsn)
				c.env["CDCPUB_SNAPSHOT_ORDER_BY"] = "[written_at]"
			}, check: "old rows", says: []string{"written_at"}},
		"two tables may have equal IDs": {
			plant: func(t *testing.T, c *connector, dsn string) {
				t.Helper()
				pgtest.Exec(t, dsn, "CREATE TABLE more (id bigint, aggregatetype text, aggregateid text, type text, payload jsonb, version bigint)")
				c.env["CDCPUB_SOURCE_TABLES"] = "[{name: public.outbox}, {name: public.more}]"
				ready(t, c, dsn)
			}, check: "message IDs", says: []string{"public.more is not a uuid"}},
		"the directory of the state has no parent": {
			plant: func(t *testing.T, c *connector, dsn string) {
				t.Helper()
				ready(t, c, dsn)
				c.env["CDCPUB_OFFSETS_PATH"] = filepath.Join(t.TempDir(), "with space", "state")
			}, check: "state", says: []string{"does not exist"}},
		"the connector would be a synchronous standby": {
			plant: func(t *testing.T, c *connector, dsn string) {
				t.Helper()
				ready(t, c, dsn)
				// Commits do not wait for the standby, or this test's own would for ever.
				pgtest.Exec(t, dsn, "ALTER SYSTEM SET synchronous_commit = local",
					"ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (cdcpub, other)'", "SELECT pg_reload_conf()")
			}, check: "synchronous_standby_names", says: []string{"freeze"}},
	}
}

// Whatever check names, the command that it prints, run as it stands, mends it.
func TestCheckNamesEachFaultOfTheSourceAndItsCommandMendsIt(t *testing.T) {
	t.Parallel()
	pg := pgtest.Start(t)
	url := rabbittest.URL(t)
	for name, fault := range sourceFaults() {
		t.Run(name, func(t *testing.T) {
			slot := rabbittest.Name(t)
			db := "db_" + slot
			pgtest.Exec(t, pg.DSN("postgres"), "CREATE DATABASE "+db)
			dsn := pg.DSN(db)
			c := newConnector(t, dsn, url, slot)
			fault.plant(t, c, dsn)
			t.Cleanup(func() {
				pgtest.Exec(t, dsn, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
				pgtest.Exec(t, dsn, "ALTER SYSTEM RESET ALL")
				pgtest.Exec(t, dsn, "SELECT pg_reload_conf()")
			})
			mended(t, c, fault, func() {})
		})
	}
}

// What only a restart of the server mends: check prints the command, the restart
// is up to whoever runs the server.
func TestCheckNamesServerSettingsAndItsCommandMendsThem(t *testing.T) {
	t.Parallel()
	pg := pgtest.Start(t, pgtest.Default("wal_level"), pgtest.Default("max_replication_slots"), pgtest.Default("max_wal_senders"))
	url := rabbittest.URL(t)
	restart := func() {
		t.Helper()
		if _, err := pg.Stop(pgtest.Fast); err != nil {
			t.Fatal(err)
		}
		if err := pg.Start(); err != nil {
			t.Fatal(err)
		}
	}
	system := func(settings ...string) func(t *testing.T, c *connector, dsn string) {
		return func(t *testing.T, c *connector, dsn string) {
			t.Helper()
			for _, s := range settings {
				pgtest.Exec(t, dsn, "ALTER SYSTEM SET "+s)
			}
			restart()
			ready(t, c, dsn)
		}
	}
	for name, fault := range map[string]sourceFault{
		"wal_level is replica": {plant: system("wal_level = replica"), check: "wal_level", says: []string{"replica"}},
		"no slot is left": {plant: func(t *testing.T, c *connector, dsn string) {
			t.Helper()
			system("wal_level = logical", "max_replication_slots = 1")(t, c, dsn)
			pgtest.Exec(t, dsn, "SELECT pg_create_physical_replication_slot('taken')")
		}, check: "max_replication_slots", says: []string{"all 1 replication slots are taken"}},
		"no walsender is left": {plant: system("wal_level = logical", "max_wal_senders = 0"), check: "max_wal_senders", says: []string{"all 0 are taken"}},
	} {
		t.Run(name, func(t *testing.T) {
			slot := rabbittest.Name(t)
			db := "db_" + slot
			pgtest.Exec(t, pg.DSN("postgres"), "CREATE DATABASE "+db)
			c := newConnector(t, pg.DSN(db), url, slot)
			fault.plant(t, c, pg.DSN(db))
			t.Cleanup(func() {
				pgtest.Exec(t, pg.DSN(db), "ALTER SYSTEM RESET ALL")
				restart()
			})
			mended(t, c, fault, restart)
		})
	}
}

// mended finds the planted fault, runs what check says and looks again.
func mended(t *testing.T, c *connector, fault sourceFault, restart func()) {
	t.Helper()
	name := fault.check
	if strings.Contains(name, "%s") {
		name = fmt.Sprintf(name, c.env["CDCPUB_SOURCE_SLOT"])
	}
	failed, output := c.check()
	failed = slices.DeleteFunc(failed, func(f finding) bool { return strings.HasPrefix(f.Note, "mended by the commands for "+name) })
	var fix []string
	for _, f := range failed {
		for _, says := range fault.says {
			if f.Check == name && !strings.Contains(f.Text, says) {
				t.Errorf("check %s says %q, not %q", f.Check, f.Text, says)
			}
		}
		if f.Check == name {
			fix = append(fix, f.Fix...)
		}
		t.Logf("%s: %s\n%s (%s) %s", f.Check, f.Text, strings.Join(f.Fix, "\n"), f.As, f.Note)
	}
	if len(fix) == 0 {
		t.Fatalf("no command mends %s:\n%s", name, output)
	}
	if len(failed) != 1 && fault.check != "table public.outbox" { // without a table there is no publication either
		t.Errorf("%d checks failed, want the planted one:\n%s", len(failed), output)
	}
	// A restart is between the command and the next look.
	if strings.Contains(failed[0].Note, "restart") {
		if _, stderr, code := c.shell(strings.Join(fix, "\n")); code != 0 {
			t.Fatalf("%q: exit %d: %s", fix, code, stderr)
		}
		restart()
		fix = nil
	}
	if failed, output := c.check(fix...); len(failed) > 0 {
		t.Errorf("after %q:\n%s", fix, output)
	}
}

// What was lost to the stream is still in the table. Starting over drops things, so
// the printed command asks first, and a terminal has to answer.
func TestCheckSaysHowToStartOverAndItsCommandsDo(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		plant  []string
		says   string
		tables string // as configured from now on
	}{
		"a table was added": {plant: []string{"CREATE TABLE more (LIKE outbox INCLUDING ALL)"}, says: "serves public.outbox, not public.more",
			tables: "[{name: public.outbox}, {name: public.more}]"},
		"the publication is gone": {plant: []string{"DROP PUBLICATION {name}"}, says: "was dropped behind replication slot"},
		"the slot is gone":        {plant: []string{"SELECT pg_drop_replication_slot('{name}')"}, says: "does not exist, but position"},
		"the publication was made anew": {plant: []string{"DROP PUBLICATION {name}", "CREATE PUBLICATION {name} FOR TABLE outbox WITH (publish = 'insert')"},
			says: "was made anew"},
	} {
		t.Run(name, func(t *testing.T) {
			dsn, url, slot := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
			insert := "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', gen_random_uuid(), 'Made', '{}', 1)"
			rabbittest.Queue(t, url, slot, slot+".order", "#", nil)
			c := newConnector(t, dsn, url, slot)
			c.must("init", "--create-table")
			pgtest.Exec(t, dsn, insert)
			c.streamOnce()
			for _, s := range tc.plant {
				pgtest.Exec(t, dsn, strings.ReplaceAll(s, "{name}", slot))
			}
			pgtest.Exec(t, dsn, insert) // the stream will never have it
			if tc.tables != "" {
				c.env["CDCPUB_SOURCE_TABLES"] = tc.tables
			}
			failed, output := c.check()
			failed = slices.DeleteFunc(failed, func(f finding) bool { return strings.HasPrefix(f.Note, "mended by the commands for ") })
			if len(failed) != 1 || !strings.Contains(failed[0].Text, tc.says) {
				t.Fatalf("want one failure that says %q:\n%s", tc.says, output)
			}
			commands := strings.Join(failed[0].Fix, "\n")
			if _, stderr, code := c.shell("set -e\n" + commands); code == 0 {
				t.Errorf("%q did not ask: %s", commands, stderr)
			}
			term := openTerminal(t)
			if _, err := term.master.WriteString("yes\n"); err != nil {
				t.Fatal(err)
			}
			if _, stderr, code := c.shellWith("set -e\n"+commands, term.slave); code != 0 {
				t.Fatalf("%q: exit %d: %s", commands, code, stderr)
			}
			if failed, output := c.check(); len(failed) > 0 {
				t.Errorf("after %q:\n%s", commands, output)
			}
			rabbittest.Drain(t, url, slot, 1, time.Minute)
			c.start()
			rabbittest.Drain(t, url, slot, 2, time.Minute) // the old one again, and the lost one
			c.stop()
			c.must("teardown", "--yes")
		})
	}
}

// Old rows are read once. A right that was needed for that alone, and is gone, keeps
// nobody from going on.
func TestCheckDoesNotAskForOldRowsOnceTheyAreOut(t *testing.T) {
	t.Parallel()
	pg := pgtest.Start(t)
	dsn := pg.DSN("postgres")
	c := newConnector(t, dsn, rabbittest.URL(t), rabbittest.Name(t))
	asRole("REPLICATION", "GRANT SELECT ON outbox TO {role}")(t, c, dsn)
	c.streamOnce()
	pgtest.Exec(t, dsn, "REVOKE SELECT ON outbox FROM role_"+c.env["CDCPUB_SOURCE_SLOT"])
	if failed, output := c.check(); len(failed) > 0 || !strings.Contains(output, "unknown old rows: ") {
		t.Errorf("check:\n%s", output)
	}
	c.streamOnce()
	c.env["CDCPUB_SOURCE_DSN"] = dsn
	c.must("teardown", "--yes")
}
