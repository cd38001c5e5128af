package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

func inspect(t testing.TB, c *Conn) Findings {
	t.Helper()
	f, err := c.Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// A sidecar on the database's own machine may have no TCP at all.
func TestUnixSocketIsAWayToTheServer(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	cfg.DSN = pgtest.Query[string](t, dsn, `SELECT format('host=%s port=%s user=postgres dbname=%s', current_setting('unix_socket_directories'),
		current_setting('port'), current_database())`)
	c := connect(t, cfg)
	pos := create(t, c)
	p := newProber(c.probeConfig(), cfg.parse)
	defer p.endProbes()
	if p.serverStopping() {
		t.Error("the probe takes the server for one that stops")
	}
	s := start(t, c, pos)
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, payload) VALUES ("+sentinel+", '')")
	if got := events(until(t, s, sentinel)); len(got) != 1 {
		t.Errorf("%d events", len(got))
	}
}

// Another host of the DSN may be a standby that lags.
func TestSiblingLeadsToTheServerThatWasReached(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	port := pgtest.Query[string](t, dsn, "SELECT current_setting('port')")
	cfg.DSN = "host=127.0.0.1,127.0.0.1,localhost port=1," + port + ",2 user=postgres dbname=" + cfg.Slot
	sibling := connect(t, cfg).Sibling()
	if sibling.Host != "127.0.0.1" || fmt.Sprint(sibling.Port) != port || sibling.Fallbacks != nil || sibling.RuntimeParams["replication"] != "" {
		t.Errorf("host %s port %d, %d fallbacks, parameters %v", sibling.Host, sibling.Port, len(sibling.Fallbacks), sibling.RuntimeParams)
	}
}

func TestInspectOfAFreshDatabaseFindsNothingAndChangesNothing(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configOf(t, dsn)
	c := connect(t, cfg)
	f := inspect(t, c)
	if f.Slot != nil || f.Publication != nil {
		t.Errorf("found slot %+v and publication %+v in an empty database", f.Slot, f.Publication)
	}
	if d := cmp.Diff([]TableState{{Name: "public.outbox"}}, f.Tables); d != "" {
		t.Errorf("tables (-want +got):\n%s", d)
	}
	if f.WALLevel != "logical" || f.InRecovery || f.SyncStandbys != "" || f.ApplicationName != "cdcpub" || f.WALEnd.IsZero() {
		t.Errorf("server: %+v", f)
	}
	if want := pgtest.Query[string](t, dsn, "SELECT system_identifier::text FROM pg_control_system()"); f.Source.SystemID != want {
		t.Errorf("system identifier %s, want %s", f.Source.SystemID, want)
	}
	if f.Source.Database != cfg.Slot || f.Source.Timeline != 1 {
		t.Errorf("database %s on timeline %d, want %s on 1", f.Source.Database, f.Source.Timeline, cfg.Slot)
	}
	if n := pgtest.Query[int](t, dsn, "SELECT count(*) FROM pg_publication"); n != 0 {
		t.Errorf("%d publications after Inspect", n)
	}
}

func TestInspectFindsSlotPublicationAndTable(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	c := connect(t, cfg)
	pos := create(t, c)
	f := inspect(t, c)
	want := &Slot{Plugin: "pgoutput", Type: "logical", Database: cfg.Slot, ConfirmedFlush: &pos.LSN, WALStatus: "reserved"}
	if d := cmp.Diff(want, f.Slot); d != "" {
		t.Errorf("slot (-want +got):\n%s", d)
	}
	oid := func(sql string) uint32 { return pgtest.Query[uint32](t, dsn, sql) }
	pub, rel := oid("SELECT oid FROM pg_publication"), oid("SELECT oid FROM pg_publication_rel")
	if d := cmp.Diff(&Publication{OID: pub, Owner: "postgres", Insert: true, ViaRoot: true, Tables: []string{"public.outbox"}}, f.Publication); d != "" {
		t.Errorf("publication (-want +got):\n%s", d)
	}
	table := TableState{
		Name: "public.outbox", OID: oid("SELECT 'outbox'::regclass::oid"), Owner: "postgres", Rows: f.Tables[0].Rows, Kind: "r", Persistence: "p", RelOID: rel, Published: true, Selectable: true,
		Columns: []outbox.Column{{Name: "id", Type: 20}, {Name: "aggregatetype", Type: 25}, {Name: "aggregateid", Type: 25},
			{Name: "type", Type: 25}, {Name: "payload", Type: 25}},
	}
	if d := cmp.Diff([]TableState{table}, f.Tables); d != "" {
		t.Errorf("tables (-want +got):\n%s", d)
	}
	saved := offsets.Checkpoint{Source: f.Source, Phase: offsets.PhaseStreaming, Pos: pos}
	if plan, err := Decide(cfg, saved, f); err != nil || plan.Action != ActionStream || plan.Pos != pos {
		t.Errorf("Decide = %+v, %v; want to stream from %s", plan, err, pos)
	}
}

// The findings of real servers that Decide's cases assume.
func TestInspectedSetupsAreRefused(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		sql  []string
		says string
	}{
		"publication without inserts":  {[]string{"CREATE PUBLICATION cdcpub FOR TABLE outbox WITH (publish = 'update')"}, "does not publish inserts"},
		"publication of another table": {[]string{"CREATE TABLE other (id int)", "CREATE PUBLICATION cdcpub FOR TABLE other"}, "serves public.other, not public.outbox"},
		"column list":                  {[]string{"CREATE PUBLICATION cdcpub FOR TABLE outbox (id, aggregatetype, aggregateid, type, payload) WITH (publish = 'insert')"}, "column list"},
		"row filter":                   {[]string{"CREATE PUBLICATION cdcpub FOR TABLE outbox WHERE (id > 5) WITH (publish = 'insert')"}, "row filter"},
		"unlogged table":               {[]string{"ALTER TABLE outbox SET UNLOGGED", "CREATE PUBLICATION cdcpub FOR ALL TABLES"}, "unlogged"},
		"unmappable table":             {[]string{"ALTER TABLE outbox DROP COLUMN type", "CREATE PUBLICATION cdcpub FOR TABLE outbox"}, `"type"`},
		"partitions without their root": {[]string{"DROP TABLE outbox",
			"CREATE TABLE outbox (id bigint, aggregatetype text, aggregateid text, type text, payload text) PARTITION BY RANGE (id)",
			"CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES FROM (0) TO (100)",
			"CREATE PUBLICATION cdcpub FOR TABLE outbox WITH (publish = 'insert')"}, "publish_via_partition_root"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := configure(t, pgtest.Database(t), tc.sql...)
			_, err := Decide(cfg, offsets.Checkpoint{}, inspect(t, connect(t, cfg)))
			if r := wantRefusal(t, err, Setup); !strings.Contains(r.Text+r.Hint, tc.says) {
				t.Errorf("the refusal %q does not say %q", r, tc.says)
			}
		})
	}
}

func TestOIDsTellARemadePublicationAndTable(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string][]string{
		"publication": {"DROP PUBLICATION cdcpub", "CREATE PUBLICATION cdcpub FOR TABLE outbox WITH (publish = 'insert')"},
		"table":       {"DROP TABLE outbox", outboxTable, "ALTER PUBLICATION cdcpub ADD TABLE outbox"},
		"entry":       {"ALTER PUBLICATION cdcpub DROP TABLE outbox", "ALTER PUBLICATION cdcpub ADD TABLE outbox"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.Database(t)
			cfg := configure(t, dsn)
			c := connect(t, cfg)
			pos := create(t, c)
			saved := offsets.Checkpoint{Source: inspect(t, c).Source, Phase: offsets.PhaseStreaming, Pos: pos}
			pgtest.Exec(t, dsn, sql...)
			_, err := Decide(cfg, saved, inspect(t, c))
			wantRefusal(t, err, Gap)
		})
	}
}

func TestSlotCreationNamesTheTransactionItWaitsFor(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t))
	c := connect(t, cfg)
	if err := c.Exec(t.Context(), "SET lock_timeout = '200ms'"); err != nil { // 30 s are long for a test
		t.Fatal(err)
	}
	writer := pgtest.Connect(t, cfg.DSN+"&application_name=shop")
	exec(t, writer, "BEGIN")
	exec(t, writer, "INSERT INTO outbox VALUES (1)")
	_, err := c.CreateSlot(t.Context())
	r := wantRefusal(t, err, Setup)
	// Other tests' transactions count as well, but this one may be the oldest.
	if !strings.Contains(r.Text, "waits for the transaction of process") {
		t.Errorf("the refusal does not name a transaction: %v", r)
	}
	if n := pgtest.Query[int](t, cfg.DSN, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", cfg.Slot); n != 0 {
		t.Error("the half-made slot is still there")
	}
	exec(t, writer, "ROLLBACK")
	eventually(t, "the slot can be made on the same connection", func() bool {
		_, err := c.CreateSlot(t.Context())
		return err == nil
	})
}

func TestBlockerNamesTheOldest(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t) // transactions of other tests would count
	cfg := configure(t, srv.DSN("postgres"))
	c := connect(t, cfg)
	if got := c.blocker(t.Context()); got != "a transaction that has ended meanwhile" {
		t.Errorf("nothing runs, but the blocker is %q", got)
	}
	prepared := pgtest.Connect(t, cfg.DSN)
	exec(t, prepared, "BEGIN")
	exec(t, prepared, "INSERT INTO outbox VALUES (1)")
	exec(t, prepared, "PREPARE TRANSACTION 'it''s old'")
	writer := pgtest.Connect(t, cfg.DSN+"&application_name=shop")
	exec(t, writer, "BEGIN")
	exec(t, writer, "INSERT INTO outbox VALUES (2)")
	if got, want := c.blocker(t.Context()), "the prepared transaction 'it''s old' (open for"; !strings.HasPrefix(got, want) {
		t.Errorf("the blocker is %q, want %q...", got, want)
	}
	exec(t, prepared, "ROLLBACK PREPARED 'it''s old'")
	got := c.blocker(t.Context())
	for _, want := range []string{"transaction of process", "shop", "idle in transaction"} {
		if !strings.Contains(got, want) {
			t.Errorf("the blocker %q does not say %q", got, want)
		}
	}
	exec(t, writer, "ROLLBACK")
}

func TestStartFromASlotInUseIsBusy(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t))
	s, pos := begin(t, cfg)
	second := connect(t, cfg)
	if f := inspect(t, second); !f.Slot.Active || f.Slot.ActivePID == 0 {
		t.Errorf("the slot in use is found as %+v", f.Slot)
	}
	_, err := second.Start(t.Context(), pos, nil)
	wantRefusal(t, err, SlotBusy)
	pgtest.Exec(t, cfg.DSN, "INSERT INTO outbox VALUES ("+sentinel+")")
	until(t, s, sentinel) // the first one did not notice
}

func TestStartFromADroppedSlotIsLost(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t))
	c := connect(t, cfg)
	pos := create(t, c)
	if err := c.DropSlot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.DropSlot(t.Context()); err != nil {
		t.Errorf("dropping a slot that does not exist: %v", err)
	}
	_, err := c.Start(t.Context(), pos, nil)
	wantRefusal(t, err, SlotLost)
	if _, err := c.Start(t.Context(), pos, nil); !errors.Is(err, errNoReplication) {
		t.Errorf("a second start on the connection: %v", err)
	}
}

func TestAnOrdinaryConnectionDoesNothingWithSlots(t *testing.T) {
	t.Parallel()
	c, err := ConnectSQL(t.Context(), configure(t, pgtest.Database(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, created := c.CreateSlot(t.Context())
	_, started := c.Start(t.Context(), offsets.Position{LSN: 1}, nil)
	for what, err := range map[string]error{"create": created, "start": started, "drop": c.DropSlot(t.Context())} {
		if !errors.Is(err, errNoReplication) {
			t.Errorf("%s: %v, want it to say that there is no replication connection", what, err)
		}
	}
}

func TestStartNeedsAPosition(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t))
	c := connect(t, cfg)
	create(t, c)
	if _, err := c.Start(t.Context(), offsets.Position{}, nil); err == nil {
		t.Error("started at position zero, which the server takes for its own choice")
	}
}

func TestConnectRefusesSlotNamesAndHidesThePassword(t *testing.T) {
	t.Parallel()
	for _, slot := range []string{"", "Upper", "with space", `quote"`, strings.Repeat("a", 64)} {
		if c, err := Connect(t.Context(), Config{DSN: "postgres://localhost/x", Slot: slot}); err == nil {
			c.Close()
			t.Errorf("slot name %q was taken", slot)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, dsn := range []string{"postgres://u:s3cret@127.0.0.1:1/x", "host=127.0.0.1 port=1 user=u password=s3cret", "postgres://u:s3cret@127.0.0.1:port/x"} {
		_, err := Connect(ctx, Config{DSN: dsn, Slot: "cdcpub"})
		if err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("Connect to %s: %v", dsn, err)
		}
	}
}

func TestOddNamesAreQuoted(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	const schema, table = `Sche"ma 'x'`, `Out.box, "1"`
	quoted := outbox.QuoteTable(schema, table)
	pgtest.Exec(t, dsn, outboxTable, "CREATE SCHEMA "+outbox.QuoteIdentifier(schema), "CREATE TABLE "+quoted+" (LIKE outbox INCLUDING ALL)")
	cfg := configOf(t, dsn)
	cfg.Publication = `My "pub", it's`
	cfg.Tables = []Table{{Name: quoted}}
	c := connect(t, cfg)
	pos := create(t, c)
	f := inspect(t, c)
	plan, err := Decide(cfg, offsets.Checkpoint{Source: f.Source, Phase: offsets.PhaseStreaming, Pos: pos}, f)
	if err != nil || plan.Action != ActionStream {
		t.Fatalf("Decide = %+v, %v", plan, err)
	}
	s := start(t, c, pos)
	pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (1)", "INSERT INTO "+quoted+" VALUES (2), ("+sentinel+")")
	got := events(until(t, s, sentinel))
	if len(got) != 2 || got[0].ID != "2" || got[0].Table != quoted {
		t.Errorf("events %+v, want 2 and %s of %s", got, sentinel, quoted)
	}
	s.Close()
	again := connect(t, cfg)
	if err := again.DropPublication(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := pgtest.Query[int](t, dsn, "SELECT count(*) FROM pg_publication"); n != 0 {
		t.Error("the publication is still there")
	}
}

func TestSlotCreationErrorsThatAnOperatorCanMend(t *testing.T) {
	c := &Conn{cfg: Config{Slot: "cdcpub"}}
	for _, code := range []string{"42501", "53400"} {
		wantRefusal(t, c.slotError(t.Context(), &pgconn.PgError{Code: code}), Setup)
	}
	for code, cause := range map[string]Cause{"55006": SlotBusy, "42704": SlotLost, "55000": SlotLost, "58P01": SlotLost} {
		wantRefusal(t, c.startError(&pgconn.PgError{Code: code}), cause)
	}
	for _, err := range []error{&pgconn.PgError{Code: "57P03"}, errors.New("broken pipe")} {
		var refusal *Refusal
		if got := c.startError(err); errors.As(got, &refusal) || !errors.Is(got, err) {
			t.Errorf("startError(%v) = %v, want it wrapped and worth a retry", err, got)
		}
	}
}

// The text of a value must not depend on what a database or a role sets.
var hostileSettings = []string{"datestyle = 'German'", "timezone = 'Asia/Kolkata'", "intervalstyle = 'sql_standard'", "bytea_output = 'escape'",
	"extra_float_digits = '-5'", "client_min_messages = 'debug1'", "standard_conforming_strings = 'off'"}

func TestValuesDoNotDependOnTheDatabasesSettings(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	name := pgtest.Query[string](t, dsn, "SELECT current_database()::text")
	for _, set := range hostileSettings {
		pgtest.Exec(t, dsn, "ALTER DATABASE "+name+" SET "+set)
	}
	pgtest.Exec(t, dsn, `CREATE TABLE outbox (id bigint PRIMARY KEY, aggregatetype text, aggregateid float8, type interval, payload bytea, occurred_at timestamptz, day date)`)
	cfg := configOf(t, dsn)
	cfg.Tables[0].Columns.Extra = []string{"day"}
	s, _ := begin(t, cfg)
	pgtest.Exec(t, dsn, `INSERT INTO outbox VALUES (`+sentinel+`, E'o\'x\\', 0.1::float8 + 0.2, '1 day 02:03:04', decode('005cff', 'hex'), '2026-03-04 05:06:07.000008+05:30', '2026-03-04')`)
	got := events(until(t, s, sentinel))[0]
	if got.Malformed != nil {
		t.Fatal(got.Malformed)
	}
	fields := []string{got.Aggregate.Type, got.Aggregate.ID, got.Type, string(got.Payload), got.OccurredAt.Format("2006-01-02T15:04:05.999999Z07:00"), got.Fields[0].Value}
	want := []string{`o'x\`, "0.30000000000000004", "1 day 02:03:04", "\x00\\\xff", "2026-03-03T23:36:07.000008Z", "2026-03-04"}
	if !slices.Equal(fields, want) {
		t.Errorf("values %q, want %q", fields, want)
	}
}
