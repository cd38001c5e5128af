package snapshot

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/internal/faultproxy"
	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

// writer writes one aggregate, version after version, until the context ends.
// Now and then it rolls back. It returns the IDs of the committed rows.
func writer(ctx context.Context, dsn string, aggregate int, random *rand.Rand, transactions *atomic.Int64) ([]string, error) {
	conn, err := pgx.Connect(context.WithoutCancel(ctx), dsn)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var committed []string
	for version := 0; ctx.Err() == nil; transactions.Add(1) {
		var batch []string
		sql := "BEGIN"
		for range 1 + random.IntN(4) {
			version++
			// IDs fall as versions rise: an order by ID would be wrong.
			id := fmt.Sprint(aggregate*1_000_000 - version)
			sql += fmt.Sprintf("; INSERT INTO outbox (id, aggregateid, version) VALUES (%s, '%d', %d)", id, aggregate, version)
			batch = append(batch, id)
		}
		if random.IntN(8) == 0 {
			sql, batch = sql+"; ROLLBACK", nil
		} else {
			sql += "; COMMIT"
		}
		if _, err := conn.Exec(context.WithoutCancel(ctx), sql); err != nil {
			return nil, err
		}
		committed = append(committed, batch...)
	}
	return committed, nil
}

func TestSnapshotAndStreamTogetherBringEachRowOnce(t *testing.T) {
	for _, chunk := range []int{1, 7, DefaultChunkRows} {
		t.Run(fmt.Sprintf("chunks of %d", chunk), func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.Database(t)
			cfg := configure(t, dsn)
			cfg.ChunkRows = chunk
			seed := rand.Uint64()
			t.Logf("seed %d", seed)

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var writers sync.WaitGroup
			var transactions atomic.Int64
			committed, failed := make([][]string, 4), make([]error, 4)
			for w := range committed {
				random := rand.New(rand.NewPCG(seed, uint64(w)))
				writers.Go(func() { committed[w], failed[w] = writer(ctx, dsn, w+1, random, &transactions) })
			}
			awaitTransactions(t, &transactions, 60)
			slot := createSlot(t, dsn)
			cfg.Exported, cfg.Point = slot.snapshot, slot.point
			awaitTransactions(t, &transactions, 60)
			s := open(t, cfg)
			if err := slot.conn.Close(t.Context()); err != nil { // the snapshot is held without it
				t.Fatal(err)
			}
			old := readAll(t, s)
			awaitTransactions(t, &transactions, 20)
			cancel()
			writers.Wait()
			if err := errors.Join(failed...); err != nil {
				t.Fatal(err)
			}

			recent := streamed(t, dsn, slot, cfg.Tables[0])
			if len(old) == 0 || len(recent) == 0 {
				t.Fatalf("%d rows of the snapshot and %d of the stream prove nothing", len(old), len(recent))
			}
			got := map[string]int{}
			versions := map[string]int64{}
			for _, e := range slices.Concat(old, recent) {
				got[e.ID]++
				if e.Aggregate.Version <= versions[e.Aggregate.ID] {
					t.Errorf("aggregate %s: version %d after %d", e.Aggregate.ID, e.Aggregate.Version, versions[e.Aggregate.ID])
				}
				versions[e.Aggregate.ID] = e.Aggregate.Version
			}
			want := map[string]int{}
			for _, id := range slices.Concat(committed...) {
				want[id] = 1
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("how often each row came (-want +got):\n%s", d)
			}
			for i, e := range old {
				if e.Origin != outbox.OriginSnapshot || e.Position.LSN != slot.point || e.Position.Tx >= slot.point || e.Position.Done != uint64(i+1) ||
					e.Position.Last != (offsets.Row{Table: "public.outbox", ID: e.ID}) {
					t.Fatalf("row %d is at %+v of %s, consistent point %s", i, e.Position, e.Origin, slot.point)
				}
			}
		})
	}
}

func awaitTransactions(t *testing.T, counter *atomic.Int64, more int64) {
	t.Helper()
	goal := counter.Load() + more
	deadline := time.After(limit)
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for counter.Load() < goal {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("%d transactions instead of %d in %s", counter.Load(), goal, limit)
		}
	}
}

const richColumns = `id uuid PRIMARY KEY, aggregatetype varchar(20), aggregateid text, type text, version bigint, schema_version int,
	kind mood, occurred_at timestamptz, tenant text, headers jsonb, traceparent text,
	amount numeric(40, 12), ratio float8, small real, flags int[], took interval, day date, at timestamp, ok boolean, raw bytea, unused text`

func richValues(payload string) string {
	return `gen_random_uuid(), 'or''der', 'é "quoted" \ ` + "\t" + `', 'T', 1, 2, 'delta', '2026-03-04 05:06:07.000008+05:30', 'ten' || chr(10) || 'ant',
	'{"n": 12345678901234567890.000, "s": "\u00e9\ud83d\ude00"}', NULL,
	12345678901234567890.123456789012, 0.1::float8 + 0.2, 1.1, '{1,NULL,3}', '1 day 02:03:04.5', '0044-03-15 BC', 'infinity', true, '\x00ff5c', 'u', ` + payload
}

// A row must be the same message whichever way it came: the two differ in their
// queries, sessions and protocols, and the database may have settings of its own.
func TestRowsAreTheSameFromSnapshotAndStream(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	name := pgtest.Query[string](t, dsn, "SELECT current_database()::text")
	for _, set := range []string{"datestyle = 'German'", "timezone = 'Asia/Kolkata'", "intervalstyle = 'sql_standard'", "bytea_output = 'escape'", "extra_float_digits = -5"} {
		pgtest.Exec(t, dsn, "ALTER DATABASE "+name+" SET "+set)
	}
	pgtest.Exec(t, dsn, "CREATE TYPE mood AS ENUM ('delta', 'snapshot')")
	cfg := Config{Server: server(t, dsn), Point: point, ChunkRows: 7}
	payloads := map[string][]string{
		"jsonb": {`'{"b": 1.10, "a": 12345678901234567890, "a": [1e400, null, "\u0041"]}'`, `'""'`, "'null'", "NULL"},
		"json":  {`'{ "b":1.10,  "a":1, "a":2 }'`, `'""'`, "NULL"},
		"bytea": {`'\x005c27ff'`, "''", "NULL"},
		"text":  {"'it''s \n\"ü\"'", "''", "NULL"},
	}
	for typ := range payloads {
		pgtest.Exec(t, dsn, "CREATE TABLE outbox_"+typ+" ("+richColumns+", payload "+typ+")")
		cfg.Tables = append(cfg.Tables, Table{Name: "public.outbox_" + typ,
			Columns: outbox.Columns{Extra: []string{"amount", "ratio", "small", "flags", "took", "day", "at", "ok", "raw"}}})
	}
	slot := createSlot(t, dsn)
	if err := slot.conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for typ, values := range payloads {
		for _, v := range values {
			pgtest.Exec(t, dsn, "INSERT INTO outbox_"+typ+" VALUES ("+richValues(v)+")")
		}
	}
	var fromStream []outbox.Event
	for _, table := range cfg.Tables {
		fromStream = append(fromStream, streamed(t, dsn, slot, table)...)
	}
	fromSnapshot := readAll(t, open(t, cfg))
	byID := cmpopts.SortSlices(func(a, b outbox.Event) bool { return a.ID < b.ID })
	ways := cmpopts.IgnoreFields(outbox.Event{}, "Origin", "CommittedAt", "Position")
	if d := cmp.Diff(fromStream, fromSnapshot, byID, ways); d != "" {
		t.Errorf("events (-stream +snapshot):\n%s", d)
	}
	if len(fromStream) != 13 {
		t.Errorf("%d events, want 13", len(fromStream))
	}
	for _, e := range fromStream {
		if e.Malformed != nil {
			t.Errorf("event of %s: %v", e.Table, e.Malformed)
		}
	}
}

func TestEmptyTableEndsAtOnce(t *testing.T) {
	t.Parallel()
	if all := readAll(t, open(t, configure(t, pgtest.Database(t)))); len(all) != 0 {
		t.Errorf("events %v of an empty table", all)
	}
}

func TestSeveralTablesComeOneAfterTheOther(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t), "CREATE TABLE second (LIKE outbox INCLUDING ALL)", "CREATE TABLE empty (LIKE outbox INCLUDING ALL)",
		insertRows(1, 3), "INSERT INTO second SELECT * FROM outbox WHERE id > 1")
	cfg.ChunkRows = 2
	cfg.Tables = []Table{{Name: "public.second"}, {Name: "public.empty"}, {Name: "public.outbox"}}
	var got []string
	for _, e := range readAll(t, open(t, cfg)) {
		got = append(got, fmt.Sprintf("%s %s %d", e.Table, e.ID, e.Position.Done))
	}
	want := []string{"public.second 2 1", "public.second 3 2", "public.outbox 1 3", "public.outbox 2 4", "public.outbox 3 5"}
	if !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}

// As in the stream, where a child's rows come under its own name.
func TestRowsOfInheritingTablesAreLeftOut(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t), insertRows(1, 2), "CREATE TABLE child () INHERITS (outbox)",
		"INSERT INTO child SELECT * FROM ONLY outbox")
	if all := readAll(t, open(t, cfg)); len(all) != 2 {
		t.Errorf("%d events, want the 2 rows of the table itself", len(all))
	}
}

// The stream does not carry them; to order by one is harmless.
func TestGeneratedColumnsAreNotMapped(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	slot := createSlot(t, dsn)
	if err := slot.conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Exec(t, dsn, "ALTER TABLE outbox DROP COLUMN payload, ADD COLUMN tenant text GENERATED ALWAYS AS ('t' || 9 - id) STORED, ADD COLUMN payload text",
		insertRows(1, 3))
	cfg.Tables[0].OrderBy = []string{"tenant"}
	fromStream, fromSnapshot := streamed(t, dsn, slot, cfg.Tables[0]), readAll(t, open(t, cfg))
	slices.Reverse(fromSnapshot) // tenants fall as IDs rise
	if d := cmp.Diff(fromStream, fromSnapshot, cmpopts.IgnoreFields(outbox.Event{}, "Origin", "CommittedAt", "Position")); d != "" {
		t.Errorf("events (-stream +snapshot):\n%s", d)
	}
	for _, e := range fromSnapshot {
		if e.Aggregate.Tenant != "" || len(e.Payload) != 100 {
			t.Errorf("event %s: tenant %q and %d bytes", e.ID, e.Aggregate.Tenant, len(e.Payload))
		}
	}
	cfg.Tables[0].Columns.Tenant = "tenant"
	if all, err := read(t, open(t, cfg)); err == nil || !strings.Contains(err.Error(), "tenant") || len(all) > 0 {
		t.Errorf("mapped by configuration: %d rows, %v", len(all), err)
	}
}

func TestOrder(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, `ALTER TABLE outbox ADD COLUMN "Odd ""name" int`,
		`INSERT INTO outbox (id, version, "Odd ""name") VALUES (1, 3, 2), (2, NULL, 1), (3, 1, 3), (4, 1, 0)`)
	for name, tc := range map[string]struct {
		columns outbox.Columns
		orderBy []string
		want    string
	}{
		"by version, then ID; rows without a version last": {want: "3 4 1 2"},
		"by ID where no version is mapped":                 {columns: outbox.Columns{Version: outbox.Unmapped}, want: "1 2 3 4"},
		"as configured":                                    {orderBy: []string{`Odd "name`}, want: "4 2 1 3"},
	} {
		cfg := cfg
		cfg.Tables = []Table{{Name: "public.outbox", Columns: tc.columns, OrderBy: tc.orderBy}}
		if got := ids(readAll(t, open(t, cfg))); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
	cfg.Tables[0].OrderBy = []string{"nonsense"}
	if all, err := read(t, open(t, cfg)); err == nil || !strings.Contains(err.Error(), `"nonsense"`) || len(all) > 0 {
		t.Errorf("order by a column that does not exist: %d rows, %v", len(all), err)
	}
}

func TestOddNamesAreQuoted(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	const schema, table = `Sche"ma 'x'`, `Out.box, "1"`
	quoted := outbox.QuoteTable(schema, table)
	cfg := configure(t, dsn, `CREATE SCHEMA "Sche""ma 'x'"`, "CREATE TABLE "+quoted+" (LIKE outbox INCLUDING ALL)", "INSERT INTO "+quoted+" VALUES (1)")
	cfg.Tables = []Table{{Name: quoted}}
	if all := readAll(t, open(t, cfg)); len(all) != 1 || all[0].Table != quoted {
		t.Errorf("events %+v", all)
	}
}

func TestBatchesHaveLimits(t *testing.T) {
	t.Parallel()
	cfg := configure(t, pgtest.Database(t), insertRows(1, 600), fmt.Sprintf(`INSERT INTO outbox (id, payload, version) VALUES
		(601, repeat('x', %d), 601), (602, '', 602), (603, repeat('x', 600000), 603), (604, repeat('x', 600000), 604)`, outbox.MaxBatchBytes+1))
	if n := len(readAll(t, open(t, cfg))); n != 604 { // read checks the batches
		t.Errorf("%d events, want 604", n)
	}
}

// Rows that a policy hides are rows that the stream would bring.
func TestRowLevelSecurityIsAnError(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	role := pgtest.Query[string](t, dsn, "SELECT current_database()::text")
	cfg := configure(t, dsn, insertRows(1, 3), "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY", "CREATE POLICY few ON outbox USING (id > 1)",
		"CREATE ROLE "+role+" LOGIN", "GRANT SELECT ON outbox TO "+role)
	t.Cleanup(func() { pgtest.Exec(t, dsn, "DROP OWNED BY "+role, "DROP ROLE "+role) })
	cfg.Server.User = role
	all, err := read(t, open(t, cfg))
	var pe *pgconn.PgError
	if !errors.As(err, &pe) || pe.Code != "42501" || len(all) > 0 {
		t.Errorf("%d rows, %v; want insufficient_privilege", len(all), err)
	}
}

func TestServerStopInTheMiddleIsAnError(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	cfg := configure(t, srv.DSN("postgres"), insertRows(1, 20_000))
	cfg.ChunkRows = 100
	for name, mode := range map[string]pgtest.Mode{"fast": pgtest.Fast, "immediate": pgtest.Immediate} {
		s := open(t, cfg)
		if b, ok := take(t, s); !ok {
			t.Fatalf("no batch (%d events): %v", len(b.Events), s.Err())
		}
		took, err := srv.Stop(mode)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: stopped in %s", name, took.Round(time.Millisecond))
		if took > 5*time.Second {
			t.Errorf("%s: the server took %s to stop", name, took)
		}
		if rows, err := read(t, s); err == nil || len(rows) >= 20_000 {
			t.Errorf("%s: %d rows and error %v", name, len(rows), err)
		}
		if err := srv.Start(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCloseIsPromptWhileNobodyReceives(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, insertRows(1, 20_000))
	for name, wait := range map[string]func(*Source){
		"before the first batch is taken": func(*Source) {},
		"in the middle":                   func(s *Source) { take(t, s) },
	} {
		s := open(t, cfg)
		wait(s)
		begin := time.Now()
		s.Close()
		s.Close() // may be called again
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("%s: Close took %s", name, took)
		}
		if err := s.Err(); err != nil {
			t.Errorf("%s: after Close: %v", name, err)
		}
		if _, ok := <-s.Batches(); ok {
			t.Errorf("%s: a batch after Close", name)
		}
	}
	// Closed while it waits for the server, not only for the receiver.
	proxy := faultproxy.Start(t, fmt.Sprintf("%s:%d", cfg.Server.Host, cfg.Server.Port))
	addr := netip.MustParseAddrPort(proxy.Addr())
	cfg.Server = cfg.Server.Copy()
	cfg.Server.Host, cfg.Server.Port = addr.Addr().String(), addr.Port()
	s := open(t, cfg)
	proxy.Stall()
	for waiting := false; !waiting; {
		select {
		case _, ok := <-s.Batches():
			if !ok {
				t.Fatal("the snapshot ended")
			}
		case <-time.After(200 * time.Millisecond):
			waiting = true
		}
	}
	begin := time.Now()
	s.Close()
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("Close took %s while a query waited", took)
	}
	if err := s.Err(); err != nil {
		t.Errorf("after Close while a query waited: %v", err)
	}
}
