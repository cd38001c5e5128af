package tests

import (
	"encoding/json"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// docBlock is a block of code in a page, with what the comment above it says.
type docBlock struct {
	name, role, lang, text string
}

// docPage is the blocks of a page that are to be run, in their order.
type docPage struct {
	t      *testing.T
	blocks []docBlock
}

// readPage reads docs/NAME.md. A block without a comment above it that says what to
// do with it would go untested.
func readPage(t *testing.T, name string) docPage {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../docs", name+".md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	p := docPage{t: t}
	all := 0
	for _, m := range regexp.MustCompile("(?ms)^<!-- (not run: [^\n]+|run: ([a-z]+)(?: as ([a-z_]+))?) -->\n```([a-z]*)\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		all++
		if m[2] != "" {
			p.blocks = append(p.blocks, docBlock{name: m[2], role: m[3], lang: m[4], text: m[5]})
		}
	}
	if fences := strings.Count("\n"+text, "\n```"); fences != 2*all || all == 0 {
		t.Fatalf("%s.md has %d lines of fences, want two for each of %d blocks with a comment above", name, fences, all)
	}
	return p
}

func (p docPage) block(lang, name string) docBlock {
	p.t.Helper()
	for _, b := range p.blocks {
		if b.lang == lang && b.name == name {
			return b
		}
	}
	p.t.Fatalf("the page has no %s block %q", lang, name)
	return docBlock{}
}

// shopServer is a server with the roles and the database of the pages.
func shopServer(t *testing.T) *pgtest.Server {
	t.Helper()
	pg := pgtest.Start(t)
	pgtest.Exec(t, pg.DSN("postgres"), "CREATE ROLE shop LOGIN", "CREATE ROLE shop_app LOGIN", "CREATE DATABASE shop OWNER shop")
	return pg
}

func shopDSN(pg *pgtest.Server, role string) string {
	return strings.Replace(pg.DSN("shop"), "postgres@", role+"@", 1)
}

// run executes an SQL block as the role that it is for.
func (b docBlock) run(t *testing.T, pg *pgtest.Server) {
	t.Helper()
	pgtest.Exec(t, shopDSN(pg, b.role), b.text)
}

// plainConnector is a connector with the names of the pages, which are the
// defaults, and without a broker if amqpURL is empty.
func plainConnector(t *testing.T, dsn, amqpURL string) *connector {
	t.Helper()
	c := newConnector(t, dsn, amqpURL, "")
	for _, v := range []string{"CDCPUB_SOURCE_SLOT", "CDCPUB_SOURCE_PUBLICATION", "CDCPUB_ROUTER_EXCHANGE"} {
		delete(c.env, v)
	}
	if amqpURL == "" {
		delete(c.env, "CDCPUB_PUBLISH_URL")
	}
	return c
}

// commands runs the cdcpub commands of a shell block as a role.
func (b docBlock) commands(t *testing.T, pg *pgtest.Server) {
	t.Helper()
	c := plainConnector(t, shopDSN(pg, b.role), "")
	if _, stderr, code := c.shell("set -e\n" + b.text); code != 0 {
		t.Fatalf("%s exit %d: %s", b.text, code, stderr)
	}
}

// The samples of producing.md, in the order of the page: at its end the outbox
// holds what the page says, the orders agree with it, and RabbitMQ gets it all.
func TestProducingSQLRuns(t *testing.T) {
	t.Parallel()
	page, pg := readPage(t, "producing"), shopServer(t)
	for _, b := range page.blocks {
		switch b.lang {
		case "sh":
			b.commands(t, pg)
		case "sql":
			b.run(t, pg)
		}
	}
	// The trigger is there by now.
	pgtest.Exec(t, shopDSN(pg, "shop_app"), "UPDATE orders SET status = 'closed', version = version + 1 WHERE id = 42")
	got := lines(t, pg, "SELECT version || ' ' || type || ' ' || kind FROM outbox WHERE aggregatetype = 'order' AND aggregateid = '42' ORDER BY version")
	want := []string{"1 OrderPlaced snapshot", "2 ItemAdded delta", "3 OrderPaid snapshot", "4 OrderShipped delta", "5 OrderChanged snapshot"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the outbox (-want +got):\n%s", d)
	}
	for _, name := range []string{"gaps", "repeats", "differences"} {
		if rows := lines(t, pg, page.block("sql", name).text); len(rows) > 0 {
			t.Errorf("query %s finds %v in what the page has written", name, rows)
		}
	}
}

func TestProducingRowsThatAreDeletedAtOnceArePublished(t *testing.T) {
	t.Parallel()
	page, pg, amqpURL, name := readPage(t, "producing"), shopServer(t), rabbittest.URL(t), rabbittest.Name(t)
	rabbittest.Queue(t, amqpURL, name, name+".basket", "#", nil)
	c := newConnector(t, pg.DSN("shop"), amqpURL, name)
	c.env["CDCPUB_SOURCE_DSN"] = shopDSN(pg, "shop")
	c.must("init", "--create-table")
	c.env["CDCPUB_SOURCE_DSN"] = pg.DSN("shop")
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
	page.block("sql", "delete").run(t, pg)
	if d := rabbittest.Drain(t, amqpURL, name, 1, time.Minute)[0]; d.Type != "BasketEmptied" {
		t.Errorf("message %s", d.Type)
	}
	if n := pgtest.Query[int](t, pg.DSN("shop"), "SELECT count(*)::int FROM outbox"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	c.stop()
}

// The queries for producers find each planted fault and nothing else.
func TestProducingQueriesFindFaults(t *testing.T) {
	t.Parallel()
	page, pg := readPage(t, "producing"), shopServer(t)
	page.block("sh", "table").commands(t, pg)
	page.block("sql", "orders").run(t, pg)
	// Without the unique key of the table that init makes, or repeats could not be planted.
	pgtest.Exec(t, pg.DSN("shop"), "ALTER TABLE outbox DROP CONSTRAINT outbox_tenant_aggregatetype_aggregateid_version_key")
	events := func(tenant, typ, id string, versions ...int) {
		for _, v := range versions {
			pgtest.Exec(t, pg.DSN("shop"), fmt.Sprintf(`INSERT INTO outbox (id, tenant, aggregatetype, aggregateid, type, payload, version)
				VALUES (gen_random_uuid(), '%s', '%s', '%s', 'Changed', '{}', %d)`, tenant, typ, id, v))
		}
	}
	order := func(id, version int) {
		pgtest.Exec(t, pg.DSN("shop"), fmt.Sprintf("INSERT INTO orders VALUES (%d, 1, 'open', %d)", id, version))
	}
	events("", "order", "1", 1, 2, 3) // as it should be
	order(1, 3)
	events("", "order", "2", 1, 2, 5, 6) // 3 and 4 are missing
	order(2, 6)
	events("", "order", "3", 1, 2, 2, 3) // 2 twice
	order(3, 3)
	events("", "order", "4", 1) // its second event is missing
	order(4, 2)
	order(5, 1)                       // none at all
	events("", "order", "6", 1)       // no such order
	events("a", "invoice", "1", 1, 2) // tenants and types have versions of their own
	events("b", "invoice", "1", 1, 2) //
	events("b", "invoice", "2", 7, 8) // older ones were deleted
	events("b", "invoice", "3", 1, 3) //
	events("a", "invoice", "3", 2)    // no gap of b's
	for name, want := range map[string][]string{
		"gaps":        {"(\"\",order,2,3,4)", "(b,invoice,3,2,2)"},
		"differences": {"(4,2,1)", "(5,1,)", "(6,,1)"},
	} {
		sql := strings.TrimSuffix(strings.TrimSpace(page.block("sql", name).text), ";")
		got := lines(t, pg, "SELECT q::text FROM ("+sql+") AS q")
		slices.Sort(got)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("query %s (-want +got):\n%s", name, d)
		}
	}
	sql := strings.TrimSuffix(strings.TrimSpace(page.block("sql", "repeats").text), ";")
	got := lines(t, pg, "SELECT concat_ws(' ', aggregatetype, aggregateid, version, count, cardinality(ids)) FROM ("+sql+") AS q")
	if d := cmp.Diff([]string{"order 3 2 2 2"}, got); d != "" {
		t.Errorf("query repeats (-want +got):\n%s", d)
	}
}

// lines is the first column of a query's rows.
func lines(t *testing.T, pg *pgtest.Server, sql string) []string {
	t.Helper()
	rows, err := pgtest.Connect(t, pg.DSN("shop")).Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		values, err := row.Values()
		return fmt.Sprint(values[0]), err
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return got
}

// tries calls the sample of the page as its text says: a second time with the same
// ID, and at an order that is closed.
const tries = `package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/examples/docsample/shop"
)

func main() {
	ctx := context.Background()
	db, err := pgx.Connect(ctx, os.Args[1])
	if err != nil {
		panic(err)
	}
	defer db.Close(ctx)
	const id, other = "5058f1af-8388-4633-8d5f-0f3a1c1f2a01", "5058f1af-8388-4633-8d5f-0f3a1c1f2a02"
	try := func(eventID string) { fmt.Println(shop.AddItem(ctx, db, eventID, 1, 300)) }
	try(id)
	try(id)
	if _, err := db.Exec(ctx, "UPDATE orders SET status = 'closed' WHERE id = 1"); err != nil {
		panic(err)
	}
	try(id)
	fmt.Println(errors.Is(shop.AddItem(ctx, db, other, 1, 300), shop.ErrNotOpen))
}
`

func TestProducingGoSampleCompilesAndKeepsItsPromises(t *testing.T) {
	t.Parallel()
	page, pg := readPage(t, "producing"), shopServer(t)
	page.block("sh", "table").commands(t, pg)
	page.block("sql", "orders").run(t, pg)
	pgtest.Exec(t, pg.DSN("shop"), "INSERT INTO orders VALUES (1, 1200, 'open', 1)")
	sample := page.block("go", "change").text
	if formatted, err := format.Source([]byte(sample)); err != nil || string(formatted) != sample {
		t.Errorf("gofmt would change the sample (%v):\n%s", err, formatted)
	}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	// An overlay puts the files into the module, whose dependencies they need, without
	// writing there.
	dir, replace := t.TempDir(), map[string]string{}
	for path, text := range map[string]string{"shop/shop.go": sample, "main.go": tries} {
		file := filepath.Join(dir, filepath.Base(path))
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(root, "examples/docsample", path)] = file
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "run", "-overlay", filepath.Join(dir, "overlay.json"), "./examples/docsample", shopDSN(pg, "shop_app"))
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	got := string(out)
	if want := strings.Repeat("<nil>\n", 3) + "true\n"; got != want {
		t.Errorf("the sample says %q, want %q", got, want)
	}
	if got := lines(t, pg, "SELECT concat_ws(' ', amount, version) FROM orders"); !slices.Equal(got, []string{"1500 2"}) {
		t.Errorf("the order is %v", got)
	}
	if got := lines(t, pg, "SELECT concat_ws(' ', aggregateid, version, payload) FROM outbox"); !slices.Equal(got, []string{`1 2 {"price": 300}`}) {
		t.Errorf("the outbox holds %v", got)
	}
}

// Not every machine has a Java compiler, so only its SQL is looked at.
func TestProducingSamplesHaveTheSameSQL(t *testing.T) {
	t.Parallel()
	page := readPage(t, "producing")
	join := regexp.MustCompile(`" \+\s+"`)
	value := regexp.MustCompile(`CAST\(\? AS jsonb\)|\$\d+|\?|'[^']*'|\b\d+\b`)
	statement := regexp.MustCompile(`(?s)(UPDATE orders .*? RETURNING version|INSERT INTO outbox .*?\) VALUES \(.*?'delta'\))`)
	found := func(lang string) []string {
		text := strings.Join(strings.Fields(join.ReplaceAllString(page.block(lang, "change").text, "")), " ")
		all := statement.FindAllString(text, -1)
		for i := range all {
			// The constants of the statement stay: a value that differs is another event.
			all[i] = value.ReplaceAllStringFunc(all[i], func(v string) string {
				if slices.Contains([]string{"'open'", "'order'", "'ItemAdded'", "'delta'", "1"}, v) {
					return v
				}
				return "?"
			})
		}
		if len(all) != 2 {
			t.Fatalf("the %s sample has the statements %q, want an UPDATE and an INSERT", lang, all)
		}
		return all
	}
	want := found("sql")
	for _, lang := range []string{"go", "java"} {
		if d := cmp.Diff(want, found(lang)); d != "" {
			t.Errorf("SQL and %s (-sql +%s):\n%s", lang, lang, d)
		}
	}
}
