package wal

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// limit bounds every wait. It is generous because the machine may be busy; what
// must be quick is measured.
const limit = 30 * time.Second

// outboxTable has short names for what tests do not care about.
const outboxTable = `CREATE TABLE outbox (id bigint PRIMARY KEY, aggregatetype text NOT NULL DEFAULT 'order',
	aggregateid text NOT NULL DEFAULT '1', type text NOT NULL DEFAULT 'created', payload text)`

// configure makes the outbox table, executes further statements and returns the
// configuration of a stream whose slot has the database's name: slots belong to
// the whole server.
func configure(t testing.TB, dsn string, statements ...string) Config {
	t.Helper()
	pgtest.Exec(t, dsn, append([]string{outboxTable}, statements...)...)
	return configOf(t, dsn)
}

func configOf(t testing.TB, dsn string) Config {
	t.Helper()
	return Config{DSN: dsn, Slot: pgtest.Query[string](t, dsn, "SELECT current_database()::text"),
		Publication: "cdcpub", Tables: []Table{{Name: "public.outbox"}}}
}

// connect opens a replication connection that is closed at the test's cleanup.
func connect(t testing.TB, cfg Config) *Conn {
	t.Helper()
	c, err := Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// create makes publication and slot and returns the slot's consistent point.
func create(t testing.TB, c *Conn) offsets.Position {
	t.Helper()
	if err := c.CreatePublication(t.Context()); err != nil {
		t.Fatal(err)
	}
	return createSlot(t, c)
}

func createSlot(t testing.TB, c *Conn) offsets.Position {
	t.Helper()
	slot, err := c.CreateSlot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return offsets.Position{LSN: slot.ConsistentPoint}
}

// begin makes publication and slot and streams from its beginning.
func begin(t testing.TB, cfg Config) (*Stream, offsets.Position) {
	t.Helper()
	c := connect(t, cfg)
	pos := create(t, c)
	return start(t, c, pos), pos
}

func start(t testing.TB, c *Conn, pos offsets.Position) *Stream {
	t.Helper()
	s, err := c.Start(t.Context(), pos, inspect(t, c).Source.Tables)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// startAgain connects and starts as soon as the walsender of an earlier stream
// has left the slot.
func startAgain(t testing.TB, cfg Config, pos offsets.Position) *Stream {
	t.Helper()
	var s *Stream
	eventually(t, "the slot is free", func() bool {
		c := connect(t, cfg)
		var err error
		s, err = c.Start(t.Context(), pos, inspect(t, c).Source.Tables)
		var refusal *Refusal
		if errors.As(err, &refusal) && refusal.Cause == SlotBusy {
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
		return true
	})
	t.Cleanup(s.Close)
	return s
}

// eventually polls until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for !ok() {
		select {
		case <-ticker.C:
		case <-deadline.C:
			t.Fatalf("waited %s until %s", limit, what)
		}
	}
}

// next takes one batch; the end of the stream fails the test.
func next(t testing.TB, s *Stream) outbox.Batch {
	t.Helper()
	b, ok := take(t, s)
	if !ok {
		t.Fatalf("the stream ended: %v", s.Err())
	}
	return b
}

func take(t testing.TB, s *Stream) (outbox.Batch, bool) {
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

// end takes batches until the stream ends, and returns what Err says at that very
// moment.
func end(t testing.TB, s *Stream) error {
	t.Helper()
	for {
		if _, ok := take(t, s); !ok {
			return s.Err()
		}
	}
}

// sentinel is the event ID of the row that ends a test's history.
const sentinel = "999999999"

// until takes batches up to and including the one that holds the event, checks
// each against the limits, and returns them.
func until(t testing.TB, s *Stream, id string) []outbox.Batch {
	t.Helper()
	var batches []outbox.Batch
	for {
		b := next(t, s)
		checkLimits(t, b)
		batches = append(batches, b)
		if n := len(b.Events); n > 0 && b.Events[n-1].ID == id {
			return batches
		}
	}
}

func checkLimits(t testing.TB, b outbox.Batch) {
	t.Helper()
	bytes := 0
	for i := range b.Events {
		bytes += b.Events[i].Size()
	}
	if n := len(b.Events); n > outbox.MaxBatchEvents || (n > 1 && bytes > outbox.MaxBatchBytes) {
		t.Errorf("a batch of %d events and %d bytes", n, bytes)
	}
}

func events(batches []outbox.Batch) []outbox.Event {
	var all []outbox.Event
	for _, b := range batches {
		all = append(all, b.Events...)
	}
	return all
}

func ids(batches []outbox.Batch) []string {
	var all []string
	for _, b := range batches {
		for i := range b.Events {
			all = append(all, b.Events[i].ID)
		}
	}
	return all
}

// wantRefusal fails unless err is a refusal of that cause.
func wantRefusal(t testing.TB, err error, cause Cause) *Refusal {
	t.Helper()
	var refusal *Refusal
	if !errors.As(err, &refusal) || refusal.Cause != cause {
		t.Fatalf("error %v (%T), want a refusal because of %s", err, err, cause)
	}
	return refusal
}

func confirmedFlush(t testing.TB, cfg Config) offsets.LSN {
	t.Helper()
	return parseLSN(t, pgtest.Query[string](t, cfg.DSN,
		"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", cfg.Slot))
}

func parseLSN(t testing.TB, s string) offsets.LSN {
	t.Helper()
	lsn, err := offsets.ParseLSN(s)
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

// exec executes one statement on an open connection.
func exec(t testing.TB, c *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := c.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("execute %q: %v", sql, err)
	}
}
