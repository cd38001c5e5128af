package snapshot

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// limit bounds every wait; the machine may be busy.
const limit = 30 * time.Second

const point = offsets.LSN(0x1000) // where the consistent point itself does not matter

const outboxTable = `CREATE TABLE outbox (id bigint PRIMARY KEY, aggregatetype text NOT NULL DEFAULT 'order',
	aggregateid text NOT NULL DEFAULT '1', type text NOT NULL DEFAULT 'created', payload text, version bigint)`

// configure makes the outbox table, executes further statements and returns the
// configuration of a fresh snapshot.
func configure(t testing.TB, dsn string, statements ...string) Config {
	t.Helper()
	pgtest.Exec(t, dsn, append([]string{outboxTable}, statements...)...)
	return Config{Server: server(t, dsn), Tables: []Table{{Name: "public.outbox"}}, Point: point, ChunkRows: DefaultChunkRows}
}

func server(t testing.TB, dsn string) *pgconn.Config {
	t.Helper()
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func open(t testing.TB, cfg Config) *Source {
	t.Helper()
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func take(t testing.TB, s *Source) (outbox.Batch, bool) {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case b, ok := <-s.Batches():
		return b, ok
	case <-timer.C:
		t.Fatalf("no batch for %s", limit)
		return outbox.Batch{}, false
	}
}

// read takes everything, checks the batches, and returns what Err says at the
// very moment of the end.
func read(t testing.TB, s *Source) ([]outbox.Event, error) {
	t.Helper()
	var all []outbox.Event
	for {
		b, ok := take(t, s)
		if !ok {
			return all, s.Err()
		}
		bytes := 0
		for i := range b.Events {
			bytes += b.Events[i].Size()
		}
		if n := len(b.Events); n == 0 || n > outbox.MaxBatchEvents || (n > 1 && bytes > outbox.MaxBatchBytes) {
			t.Errorf("a batch of %d events and %d bytes", n, bytes)
		}
		if want := (offsets.Position{LSN: s.cfg.Point}); b.Through != want {
			t.Errorf("a batch stands for %s: the slot must stay at %s", b.Through, want)
		}
		all = append(all, b.Events...)
	}
}

func readAll(t testing.TB, s *Source) []outbox.Event {
	t.Helper()
	all, err := read(t, s)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Rows(); got != uint64(len(all)) {
		t.Errorf("counted %d rows, want %d", got, len(all))
	}
	return all
}

// created is a slot with its exported snapshot, which lives as long as the
// connection does nothing else.
type created struct {
	conn     *pgconn.PgConn
	point    offsets.LSN
	snapshot string
	name     string
}

func createSlot(t testing.TB, dsn string) created {
	t.Helper()
	pgtest.Exec(t, dsn, "CREATE PUBLICATION cdcpub FOR ALL TABLES WITH (publish = 'insert')")
	name := pgtest.Query[string](t, dsn, "SELECT current_database()::text")
	cfg := server(t, dsn)
	cfg.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	res, err := conn.Exec(t.Context(), "CREATE_REPLICATION_SLOT "+name+" LOGICAL pgoutput EXPORT_SNAPSHOT").ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	row := res[0].Rows[0]
	lsn, err := offsets.ParseLSN(string(row[1]))
	if err != nil {
		t.Fatal(err)
	}
	return created{conn: conn, point: lsn, snapshot: string(row[2]), name: name}
}

// streamed reads the inserts that the slot brings for one table, as the stream
// does: by pgoutput, under the same session settings. It decodes by hand, because
// one source knows nothing of the other.
func streamed(t testing.TB, dsn string, slot created, table Table) []outbox.Event {
	t.Helper()
	conn := pgtest.Connect(t, dsn)
	var oid uint32
	var cols []outbox.Column
	if err := conn.QueryRow(t.Context(), "SELECT $1::regclass::oid", table.Name).Scan(&oid); err != nil {
		t.Fatal(err)
	}
	rows, err := conn.Query(t.Context(), "SELECT attname, atttypid FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum", oid)
	if err != nil {
		t.Fatal(err)
	}
	if cols, err = pgx.CollectRows(rows, pgx.RowToStructByPos[outbox.Column]); err != nil {
		t.Fatal(err)
	}
	mapping, err := outbox.Bind(table.Name, cols, table.Columns)
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{"datestyle = 'ISO, MDY'", "intervalstyle = 'postgres'", "timezone = 'UTC'", "bytea_output = 'hex'", "extra_float_digits = 3"} {
		if _, err := conn.Exec(t.Context(), "SET "+set); err != nil {
			t.Fatal(err)
		}
	}
	rows, err = conn.Query(t.Context(), `SELECT data FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL, 'proto_version', '1', 'publication_names', 'cdcpub')`, slot.name)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		t.Fatal(err)
	}
	var all []outbox.Event
	for _, m := range messages {
		if m[0] == 'I' && binary.BigEndian.Uint32(m[1:]) == oid {
			all = append(all, mapping.Event(tuple(m[6:])))
		}
	}
	return all
}

// tuple decodes TupleData ("Logical Replication Message Formats").
func tuple(b []byte) [][]byte {
	values := make([][]byte, binary.BigEndian.Uint16(b))
	b = b[2:]
	for i := range values {
		kind := b[0]
		b = b[1:]
		if kind == 't' {
			n := binary.BigEndian.Uint32(b)
			values[i], b = b[4:4+n:4+n], b[4+n:]
		}
	}
	return values
}

func ids(events []outbox.Event) string {
	all := make([]string, len(events))
	for i, e := range events {
		all[i] = e.ID
	}
	return strings.Join(all, " ")
}

func insertRows(from, to int) string {
	return fmt.Sprintf("INSERT INTO outbox (id, payload, version) SELECT n, repeat('x', 100), n FROM generate_series(%d, %d) n", from, to)
}
