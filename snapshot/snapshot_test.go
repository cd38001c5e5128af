package snapshot

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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
	cfg := Config{DSN: dsn, Point: point, ChunkRows: 7}
	payloads := map[string]string{
		"jsonb": `'{"b": 1.10, "a": 12345678901234567890, "a": [1e400, null, "\u0041"]}'`, "json": `'{ "b":1.10,  "a":1, "a":2 }'`,
		"bytea": `'\x005c27ff'`, "text": `'it''s ` + "\n" + `"ü"'`,
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
	for typ, payload := range payloads {
		table := "outbox_" + typ
		pgtest.Exec(t, dsn, "INSERT INTO "+table+" VALUES ("+richValues(payload)+")", "INSERT INTO "+table+" VALUES ("+richValues("NULL")+")",
			"INSERT INTO "+table+" VALUES ("+richValues("''::text::"+map[string]string{"jsonb": "text::varchar", "json": "text"}[typ])+")")
	}
	_ = slot
}
