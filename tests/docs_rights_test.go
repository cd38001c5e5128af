package tests

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// without is a block less a part of its text, if that is in it.
func (b docBlock) without(part string) docBlock {
	b.text = strings.Replace(b.text, part, "", 1)
	return b
}

// grant sets up database and connector as permissions.md says, less one part of
// its statements. The database is the hardened one, in which nothing is given to
// everybody.
func grant(t *testing.T, page docPage, pg *pgtest.Server, part string) {
	t.Helper()
	page.block("sql", "role").without(part).run(t, pg)
	page.block("sh", "init").commands(t, pg)
	page.block("sql", "grants").without(part).run(t, pg)
	page.block("sql", "harden").run(t, pg)
}

// Whatever right is left out, run does not work, says why, and works as soon as
// the right is there.
func TestPermissionsEachRightInPostgreSQLIsNeeded(t *testing.T) {
	t.Parallel()
	page, amqpURL := readPage(t, "permissions"), rabbittest.URL(t)
	for name, tc := range map[string]struct{ part, says, mend string }{
		"REPLICATION": {" REPLICATION", "replication", "ALTER ROLE cdcpub REPLICATION"},
		"CONNECT":     {"GRANT CONNECT ON DATABASE shop TO cdcpub;", "permission denied for database", ""},
		"USAGE":       {"GRANT USAGE ON SCHEMA public TO cdcpub;", "may not read the old rows", ""},
		"SELECT":      {"GRANT SELECT ON public.outbox TO cdcpub;", "may not read the old rows", ""},
	} {
		t.Run(name, func(t *testing.T) {
			pg := shopServer(t)
			grant(t, page, pg, tc.part)
			c := plainConnector(t, shopDSN(pg, "cdcpub"), amqpURL)
			failed, output := c.check()
			if !slices.ContainsFunc(failed, func(f finding) bool { return strings.Contains(f.Text, tc.says) }) {
				t.Errorf("check does not say %q:\n%s", tc.says, output)
			}
			c.start()
			eventually(t, 20*time.Second, "run says "+tc.says, func() bool {
				s := c.status()
				return (s.State == "waiting" || s.State == "refused") && strings.Contains(s.Reason, tc.says)
			})
			if tc.mend == "" {
				tc.mend = tc.part
			}
			pgtest.Exec(t, pg.DSN("shop"), tc.mend)
			eventually(t, 30*time.Second, "run works", func() bool { return c.status().Ready })
			c.stop()
		})
	}
}

func TestPermissionsOfMigrations(t *testing.T) {
	t.Parallel()
	page := readPage(t, "permissions")
	for name, tc := range map[string]struct {
		without string
		exists  bool // the table, as another role's
		says    string
	}{
		"what the page gives is enough":               {"", false, ""},
		"CREATE on the database is needed":            {", CREATE ON DATABASE shop", false, "permission denied for database"},
		"CREATE on the schema is needed":              {", CREATE ON SCHEMA public", false, "permission denied for schema"},
		"a table of another role cannot be published": {"", true, "must be owner of table outbox"},
	} {
		t.Run(name, func(t *testing.T) {
			pg := shopServer(t)
			page.block("sql", "harden").run(t, pg)
			b := page.block("sql", "migrator")
			// GRANT CONNECT, CREATE ON ... becomes GRANT CONNECT ON ...
			b.text = strings.Replace(b.text, tc.without, strings.TrimPrefix(tc.without, ", CREATE"), 1)
			b.run(t, pg)
			if tc.exists {
				plainConnector(t, shopDSN(pg, "shop"), "").must("init", "--create-table")
				pgtest.Exec(t, pg.DSN("shop"), "DROP PUBLICATION cdcpub")
			}
			_, stderr, code := plainConnector(t, shopDSN(pg, "shop_migrator"), "").cli("init", "--create-table")
			if (code == 0) != (tc.says == "") || !strings.Contains(stderr, tc.says) {
				t.Errorf("exit %d: %s", code, stderr)
			}
		})
	}
}

func TestPermissionsOfTheConnectorsRole(t *testing.T) {
	t.Parallel()
	page, amqpURL := readPage(t, "permissions"), rabbittest.URL(t)
	t.Run("row-level security is refused until it is bypassed", func(t *testing.T) {
		pg := shopServer(t)
		grant(t, page, pg, "")
		pgtest.Exec(t, shopDSN(pg, "shop"), "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY", "CREATE POLICY everything ON outbox USING (true)")
		c := plainConnector(t, shopDSN(pg, "cdcpub"), amqpURL)
		c.start()
		eventually(t, 20*time.Second, "run refuses", func() bool { return strings.Contains(c.status().Reason, "row-level security") })
		page.block("sql", "rls").run(t, pg)
		eventually(t, 30*time.Second, "run works", func() bool { return c.status().Ready })
		c.stop()
	})
	t.Run("without old rows nothing in the database need be readable", func(t *testing.T) {
		pg := shopServer(t)
		grant(t, page, pg, page.block("sql", "grants").text)
		c := plainConnector(t, shopDSN(pg, "cdcpub"), amqpURL)
		c.env["CDCPUB_SNAPSHOT_MODE"] = "never"
		c.start()
		eventually(t, 30*time.Second, "run works", func() bool { return c.status().Ready })
		c.stop()
	})
	t.Run("REPLICATION alone reads every table", func(t *testing.T) {
		pg := shopServer(t)
		grant(t, page, pg, page.block("sql", "grants").text)
		pgtest.Exec(t, shopDSN(pg, "shop"), "CREATE TABLE private (secret text)")
		pgtest.Exec(t, shopDSN(pg, "cdcpub"), "SELECT pg_create_logical_replication_slot('spy', 'test_decoding')")
		pgtest.Exec(t, shopDSN(pg, "shop"), "INSERT INTO private VALUES ('in the log')")
		if n := pgtest.Query[int](t, shopDSN(pg, "cdcpub"), "SELECT count(*)::int FROM pg_logical_slot_get_changes('spy', NULL, NULL) WHERE data LIKE '%in the log%'"); n != 1 {
			t.Errorf("%d changes, want the one that was not granted", n)
		}
	})
	t.Run("check sees the names of standbys without pg_monitor", func(t *testing.T) {
		pg := shopServer(t)
		grant(t, page, pg, "")
		pgtest.Exec(t, pg.DSN("shop"), "ALTER SYSTEM SET synchronous_commit = local", "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
		pgtest.Connect(t, pg.DSN("shop")+"&replication=database&application_name=standby1")
		c := plainConnector(t, shopDSN(pg, "cdcpub"), amqpURL)
		eventually(t, 20*time.Second, "check names the standby", func() bool {
			failed, _ := c.check()
			return slices.ContainsFunc(failed, func(f finding) bool {
				return f.Check == "synchronous_standby_names" && strings.Contains(strings.Join(f.Fix, "\n"), "standby1")
			})
		})
	})
	t.Run("CONNECT shows the offset, and status needs no database", func(t *testing.T) {
		pg := shopServer(t)
		page.block("sql", "harden").run(t, pg)
		page.block("sql", "role").without(" REPLICATION").run(t, pg)
		c := plainConnector(t, shopDSN(pg, "cdcpub"), amqpURL)
		if stdout, stderr, code := c.cli("offset", "show", "--output", "json"); code != 0 || !strings.Contains(stdout, `"slot_exists": false`) {
			t.Errorf("offset show: exit %d: %s%s", code, stdout, stderr)
		}
		c.env["CDCPUB_SOURCE_DSN"] = "postgres://nobody@127.0.0.1:1/none"
		c.must("status")
	})
}

// The line of the page is enough, for the connector and for nothing else.
func TestPermissionsHostBasedAuthentication(t *testing.T) {
	t.Parallel()
	page, pg := readPage(t, "permissions"), shopServer(t)
	grant(t, page, pg, "")
	others := "host all postgres,shop 127.0.0.1/32 trust\n"
	if err := os.WriteFile(filepath.Join(pg.DataDir(), "pg_hba.conf"), []byte(page.block("", "hba").text+others), 0o600); err != nil {
		t.Fatal(err)
	}
	pgtest.Exec(t, pg.DSN("postgres"), "SELECT pg_reload_conf()")
	try := func(dsn string) string {
		conn, err := pgx.Connect(t.Context(), dsn)
		if err == nil {
			_ = conn.Close(t.Context()) // only that it opened counts
			return ""
		}
		return err.Error()
	}
	eventually(t, 20*time.Second, "a password is asked for", func() bool { return try(shopDSN(pg, "cdcpub")) != "" })
	dsn := shopDSN(pg, "cdcpub:secret")
	if err := try(strings.Replace(dsn, "/shop", "/postgres", 1)); !strings.Contains(err, "no pg_hba.conf entry") {
		t.Errorf("another database: %q", err)
	}
	if err := try(dsn + "&replication=true"); !strings.Contains(err, "no pg_hba.conf entry for replication connection") {
		t.Errorf("physical replication: %q", err)
	}
	c := plainConnector(t, dsn, rabbittest.URL(t))
	c.start()
	eventually(t, 30*time.Second, "run works", func() bool { return c.status().Ready })
	c.stop()

	if _, stderr, code := c.cli("teardown", "--yes"); code != 1 || !strings.Contains(stderr, "takes its owner") {
		t.Errorf("teardown of another's publication: exit %d: %s", code, stderr)
	}
	if n := pgtest.Query[int](t, pg.DSN("shop"), "SELECT count(*)::int FROM pg_replication_slots"); n != 1 {
		t.Errorf("%d slots after a teardown that was refused", n)
	}
	page.block("sql", "unpublish").run(t, pg)
	c.must("teardown", "--yes")
}

// broker is a RabbitMQ with a page's commands for it.
type docBroker struct {
	t      *testing.T
	rabbit *rabbittest.Server
	page   docPage
	path   string // with rabbitmqctl
}

// ctl runs shell commands that call rabbitmqctl.
func (b docBroker) ctl(commands string) {
	b.t.Helper()
	cmd := exec.CommandContext(b.t.Context(), "sh", "-ec", commands)
	cmd.Env = []string{"PATH=" + b.path + ":" + os.Getenv("PATH")}
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("%s: %v\n%s", commands, err, out)
	}
}

func (b docBroker) url(user string) string {
	u := url.URL{Scheme: "amqp", User: url.UserPassword(user, "secret"), Host: b.rabbit.Addr(), Path: "/"}
	return u.String()
}

// Each right of the page, added one after the other: before it is there something
// does not work, and with all of them everything does.
func TestPermissionsEachRightInRabbitMQIsNeeded(t *testing.T) {
	t.Parallel()
	page, pg := readPage(t, "permissions"), shopServer(t)
	grant(t, page, pg, "")
	b := docBroker{t: t, rabbit: rabbittest.Start(t, rabbittest.Management()), page: page, path: t.TempDir()}
	if err := b.rabbit.CtlScript(filepath.Join(b.path, "rabbitmqctl")); err != nil {
		t.Fatal(err)
	}
	event := func(typ, id string) {
		pgtest.Exec(t, shopDSN(pg, "shop"), fmt.Sprintf(`INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
			VALUES (gen_random_uuid(), '%s', '%s', 'Made', '{}', 1)`, typ, id))
	}
	event("order", "42")
	b.setUp(plainConnector(t, shopDSN(pg, "cdcpub"), b.url("topology")))

	c := plainConnector(t, shopDSN(pg, "cdcpub"), b.url("cdcpub"))
	user, permit, _ := strings.Cut(page.block("sh", "publisher").text, "\n")
	b.ctl(user)
	if failed, output := c.check(); len(failed) != 1 || failed[0].Check != "broker" {
		t.Errorf("check without any right:\n%s", output)
	}
	b.ctl("rabbitmqctl set_permissions -p / cdcpub '^$' '^$' '^$'")
	if failed, output := c.check(); len(failed) != 1 || failed[0].Check != "exchange outbox.event.order" {
		t.Errorf("check without the right to write:\n%s", output)
	}
	c.start()
	eventually(t, 30*time.Second, "the event waits", func() bool { return c.status().Relay.WaitingAggregates == 1 })
	b.ctl(permit)
	arrives := func(key string) {
		t.Helper()
		if d := rabbittest.Drain(t, b.rabbit.URL(), "cdcpub.events", 1, time.Minute)[0]; d.RoutingKey != key {
			t.Errorf("message %s, want %s", d.RoutingKey, key)
		}
	}
	arrives("42")
	eventually(t, 30*time.Second, "run is ready", func() bool { return c.status().Ready })

	management := func() (text string) {
		t.Helper()
		stdout, stderr, _ := c.cli("check", "--management", b.rabbit.ManagementURL())
		return stdout + stderr
	}
	if got := management(); !strings.Contains(got, "takes the tag management") {
		t.Errorf("check --management without the tag:\n%s", got)
	}
	b.ctl(page.block("sh", "management").text)
	if got := management(); !strings.Contains(got, "it has 2 bindings") {
		t.Errorf("check --management:\n%s", got)
	}

	b.ctl(page.block("sh", "topic").text)
	event("order", "a-43")
	event("order", "44")
	arrives("44")
	eventually(t, 30*time.Second, "the other event waits", func() bool { return c.status().Relay.WaitingAggregates == 1 })
	b.ctl("rabbitmqctl clear_topic_permissions -p / cdcpub outbox.event.order")
	arrives("a-43")
	c.stop()
	b.declares(c, event)
}

// setUp makes the exchange and the queues as the user topology.
func (b docBroker) setUp(admin *connector) {
	b.t.Helper()
	user, permit, _ := strings.Cut(b.page.block("sh", "topology").text, "\n")
	b.ctl(user)
	patterns := regexp.MustCompile(`'[^']*'`).FindAllStringIndex(permit, -1)
	if len(patterns) != 3 {
		b.t.Fatalf("%q has %d patterns", permit, len(patterns))
	}
	for i, right := range []string{"configure", "write", "read"} {
		b.ctl(permit[:patterns[i][0]] + "'^$'" + permit[patterns[i][1]:])
		if _, stderr, code := admin.cli("init", "--broker"); code != 1 || !strings.Contains(stderr, "the user has no right to") {
			b.t.Errorf("init --broker without %s: exit %d: %s", right, code, stderr)
		}
	}
	b.ctl(permit)
	admin.must("init", "--broker")
	admin.must("init", "--broker", "--shards", "2")
	// The messages of the shards are nobody's here.
	ch := rabbittest.Channel(b.t, b.rabbit.URL())
	for _, name := range []string{"cdcpub.events.0", "cdcpub.events.1"} {
		if _, err := ch.QueueDelete(name, false, false, false); err != nil {
			b.t.Fatal(err)
		}
	}
}

// declares has run declare an exchange, which takes one right more.
func (b docBroker) declares(c *connector, event func(typ, id string)) {
	b.t.Helper()
	c.env["CDCPUB_PUBLISH_DECLARE"] = "true"
	event("invoice", "1")
	c.start()
	eventually(b.t, 30*time.Second, "the event waits", func() bool { return c.status().Relay.WaitingAggregates == 1 })
	exists := func() bool {
		ch := rabbittest.Channel(b.t, b.rabbit.URL())
		return ch.ExchangeDeclarePassive("outbox.event.invoice", amqp.ExchangeTopic, true, false, false, false, nil) == nil
	}
	if exists() {
		b.t.Error("the exchange was made without the right to configure it")
	}
	b.ctl(b.page.block("sh", "declare").text)
	eventually(b.t, 30*time.Second, "run has made the exchange", exists)
	rabbittest.Queue(b.t, b.rabbit.URL(), "invoices", "outbox.event.invoice", "#", nil)
	if d := rabbittest.Drain(b.t, b.rabbit.URL(), "invoices", 1, time.Minute)[0]; d.RoutingKey != "1" {
		b.t.Errorf("message %s", d.RoutingKey)
	}
	c.stop()
}
