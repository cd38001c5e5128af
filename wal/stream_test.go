package wal

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

func TestRowsComeInCommitOrderAndRolledBackOnesNever(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, _ := begin(t, configure(t, dsn))
	a, b, c := pgtest.Connect(t, dsn), pgtest.Connect(t, dsn), pgtest.Connect(t, dsn)
	exec(t, a, "BEGIN")
	exec(t, a, "INSERT INTO outbox VALUES (1)")
	exec(t, b, "BEGIN")
	exec(t, b, "INSERT INTO outbox VALUES (2)")
	exec(t, c, "BEGIN")
	exec(t, c, "INSERT INTO outbox VALUES (3)")
	exec(t, b, "INSERT INTO outbox VALUES (4)")
	exec(t, b, "COMMIT")
	exec(t, c, "ROLLBACK")
	exec(t, a, "INSERT INTO outbox VALUES (5)")
	exec(t, a, "COMMIT")
	exec(t, c, "INSERT INTO outbox VALUES ("+sentinel+")")
	if got, want := ids(until(t, s, sentinel)), []string{"2", "4", "1", "5", sentinel}; !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

func TestBigTransactionComesInManyBatchesWhileItIsRead(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, restart := begin(t, configure(t, dsn))
	const rows = 20_000
	pgtest.Exec(t, dsn, fmt.Sprintf("INSERT INTO outbox (id, payload) SELECT CASE n WHEN %d THEN %s ELSE n END, repeat('x', 200) FROM generate_series(1, %[1]d) n", rows, sentinel))
	first := next(t, s)
	for ; len(first.Events) == 0; first = next(t, s) {
		restart = first.Through // what happened before
	}
	if first.Through != first.Events[len(first.Events)-1].Position {
		t.Fatalf("the first batch stands for %s, not for its last event", first.Through)
	}
	if got := s.Stats(); got.Received > first.Through.Tx || got.Events > 2*outbox.MaxBatchEvents {
		t.Errorf("at the first batch %d events and the log up to %s were read already", got.Events, got.Received)
	}
	batches := append([]outbox.Batch{first}, until(t, s, sentinel)...)
	all := events(batches)
	if len(all) != rows || len(batches) < rows/outbox.MaxBatchEvents {
		t.Fatalf("%d events in %d batches, want %d in %d or more", len(all), len(batches), rows, rows/outbox.MaxBatchEvents)
	}
	// A keepalive that came just before may be part of the first batch.
	begin := all[0].Position
	if begin.LSN < restart.LSN || begin.LSN > begin.Tx {
		t.Fatalf("the transaction is at %s, the restart point before was %s", begin, restart)
	}
	for i, e := range all {
		if e.Position.LSN != begin.LSN || e.Position.Tx != all[0].Position.Tx || e.Position.Done != uint64(i+1) {
			t.Fatalf("event %d is at %s", i, e.Position)
		}
	}
	if got := s.Stats().Events; got != rows {
		t.Errorf("counted %d events, want %d", got, rows)
	}
}

func TestBigEventTravelsAlone(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, _ := begin(t, configure(t, dsn))
	pgtest.Exec(t, dsn, fmt.Sprintf(`INSERT INTO outbox (id, payload) VALUES (1, 'small'), (2, repeat('x', %d)), (3, 'small'),
		(4, repeat('x', 600000)), (5, repeat('x', 600000)), (%s, '')`, outbox.MaxBatchBytes+1, sentinel))
	for _, b := range until(t, s, sentinel) { // checks the limits
		if len(b.Events) > 1 && slices.ContainsFunc(b.Events, func(e outbox.Event) bool { return e.ID == "2" }) {
			t.Errorf("the big event came in a batch of %d", len(b.Events))
		}
	}
}

func TestResumeWithAnotherRowThanSavedIsAMismatch(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	s, _ := begin(t, cfg)
	pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (1), (2), ("+sentinel+")")
	second := events(until(t, s, sentinel))[1].Position
	s.Close()
	wrongRow, wrongTable, tooMany := second, second, second
	wrongRow.Last.ID = "7"
	wrongTable.Last.Table = "public.other"
	tooMany.Done = 4
	for name, pos := range map[string]offsets.Position{
		"another event ID": wrongRow, "another table": wrongTable, "more events than the transaction has": tooMany,
	} {
		s := startAgain(t, cfg, pos)
		var mismatch *ResumeMismatchError
		if err := end(t, s); !errors.As(err, &mismatch) || mismatch.Saved != pos {
			t.Errorf("%s: the stream ended with %v", name, err)
		}
	}
	s = startAgain(t, cfg, second.Restart())
	if got := ids(until(t, s, sentinel)); len(got) != 3 {
		t.Errorf("read again from the beginning of the transaction: %v", got)
	}
}

// awaitThrough takes batches until one stands for lsn or more.
func awaitThrough(t *testing.T, s *Stream, lsn offsets.LSN) offsets.LSN {
	t.Helper()
	for {
		if b := next(t, s); b.Through.LSN >= lsn && b.Through.Tx.IsZero() {
			return b.Through.LSN
		}
	}
}

func TestWritesElsewhereAdvanceTheSlot(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, "CREATE TABLE other (id int)")
	s, pos := begin(t, cfg)
	pgtest.Exec(t, dsn, "INSERT INTO other SELECT generate_series(1, 1000)")
	written := parseLSN(t, pgtest.Query[string](t, dsn, "SELECT pg_current_wal_flush_lsn()::text"))
	if written <= pos.LSN {
		t.Fatalf("1,000 rows ended at %s, before the slot's beginning %s", written, pos)
	}
	through := awaitThrough(t, s, written)
	if got := confirmedFlush(t, cfg); got != pos.LSN {
		t.Errorf("the slot stands at %s before anything was acknowledged, want %s", got, pos)
	}
	s.Ack(through)
	s.Ack(pos.LSN) // must not undo it
	eventually(t, "confirmed_flush_lsn is what was acknowledged", func() bool { return confirmedFlush(t, cfg) == through })
}

func TestWithoutAckTheSlotStaysWhereItWas(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	s, pos := begin(t, cfg)
	pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (1)", "INSERT INTO outbox VALUES ("+sentinel+")")
	until(t, s, sentinel)
	// The server has heard what was received, and takes nothing else from it.
	eventually(t, "a status with all that was received has arrived", func() bool {
		return pgtest.Query[bool](t, dsn, `SELECT coalesce((SELECT write_lsn > $2::pg_lsn AND flush_lsn = $2::pg_lsn
			FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = $1), false)`, cfg.Slot, pos.LSN.String())
	})
	if got := confirmedFlush(t, cfg); got != pos.LSN {
		t.Errorf("the slot moved to %s without an acknowledgement, want %s", got, pos)
	}
	s.Close()
	if s.Err() != nil {
		t.Errorf("after Close: %v", s.Err())
	}
	s = startAgain(t, cfg, pos)
	if got := ids(until(t, s, sentinel)); len(got) != 2 {
		t.Errorf("read again: %v", got)
	}
}

func TestCloseSendsTheLastAck(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	s, _ := begin(t, cfg)
	pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES ("+sentinel+")")
	through := awaitThrough(t, s, parseLSN(t, pgtest.Query[string](t, dsn, "SELECT pg_current_wal_flush_lsn()::text")))
	s.Ack(through)
	s.Close()
	s.Close() // may be called again
	if _, open := <-s.Batches(); open {
		t.Error("a batch after Close")
	}
	eventually(t, "the walsender has left", func() bool {
		return !pgtest.Query[bool](t, dsn, "SELECT active FROM pg_replication_slots WHERE slot_name = $1", cfg.Slot)
	})
	if got := confirmedFlush(t, cfg); got != through {
		t.Errorf("the slot stands at %s, want the last acknowledgement %s", got, through)
	}
}

func TestPublicationOfAllTablesBringsOursAlone(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, "CREATE TABLE other (id int PRIMARY KEY)", "CREATE PUBLICATION cdcpub FOR ALL TABLES")
	c := connect(t, cfg)
	pos := createSlot(t, c)
	f := inspect(t, c)
	if _, err := Decide(cfg, offsets.Checkpoint{Source: f.Source, Phase: offsets.PhaseStreaming, Pos: pos}, f); err != nil {
		t.Fatal(err)
	}
	s := start(t, c, pos)
	pgtest.Exec(t, dsn, "INSERT INTO other SELECT generate_series(1, 10)", "UPDATE other SET id = id + 100", "DELETE FROM other WHERE id > 105",
		"BEGIN; INSERT INTO other VALUES (1); INSERT INTO outbox VALUES (1); UPDATE outbox SET payload = 'x'; DELETE FROM outbox; COMMIT",
		"TRUNCATE other", "INSERT INTO outbox VALUES ("+sentinel+")")
	got := events(until(t, s, sentinel))
	if len(got) != 2 || got[0].ID != "1" || got[0].Position.Done != 1 {
		t.Errorf("events %+v, want 1 and %s, counted without other tables' rows", got, sentinel)
	}
	// 10 + 1 foreign rows; 10 + 1 updates; 5 + 1 deletes; 1 truncate.
	if n := s.Stats().Ignored; n != 29 {
		t.Errorf("ignored %d messages, want 29", n)
	}
}

func TestPartitionsComeUnderTheirRoot(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	pgtest.Exec(t, dsn, "CREATE TABLE outbox (id bigint, aggregatetype text DEFAULT 'order', aggregateid text DEFAULT '1', type text DEFAULT 'created', payload text) PARTITION BY RANGE (id)",
		"CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES FROM (0) TO (100)")
	cfg := configOf(t, dsn)
	s, _ := begin(t, cfg)
	// The second partition is made behind the slot, with its columns in another order.
	pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (1, 'order', 'a')", "INSERT INTO outbox_1 VALUES (2, 'order', 'a')",
		"CREATE TABLE outbox_2 (payload text, type text DEFAULT 'created', aggregateid text, aggregatetype text, id bigint)",
		"ALTER TABLE outbox ATTACH PARTITION outbox_2 FOR VALUES FROM (100) TO (MAXVALUE)",
		"INSERT INTO outbox VALUES (100, 'order', 'a')", "DROP TABLE outbox_1", "INSERT INTO outbox VALUES ("+sentinel+", 'order', 'a')")
	got := events(until(t, s, sentinel))
	if len(got) != 4 {
		t.Errorf("%d events, want 4", len(got))
	}
	for _, e := range got {
		if e.Table != "public.outbox" || e.Aggregate.ID != "a" || e.Type != "created" {
			t.Errorf("event %+v", e)
		}
	}
}

func TestDroppedMappedColumnIsARefusal(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, _ := begin(t, configure(t, dsn))
	pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (1)", "ALTER TABLE outbox DROP COLUMN payload", "INSERT INTO outbox VALUES (2)")
	if got := ids(until(t, s, "1")); len(got) != 1 {
		t.Errorf("before the change: %v", got)
	}
	if r := wantRefusal(t, end(t, s), Setup); !strings.Contains(r.Text, `"payload"`) {
		t.Errorf("the refusal does not name the column: %v", r)
	}
}

func TestDroppedPublicationEndsTheStream(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, _ := begin(t, configure(t, dsn))
	pgtest.Exec(t, dsn, "DROP PUBLICATION cdcpub", "INSERT INTO outbox VALUES (1)")
	if err := end(t, s); err == nil {
		t.Error("the stream ended without an error")
	}
	if n := s.Stats().Events; n != 0 {
		t.Errorf("%d events", n)
	}
}

func TestMalformedRowTravelsWithItsReason(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, _ := begin(t, configure(t, dsn))
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregateid) VALUES (1, '')", "INSERT INTO outbox VALUES ("+sentinel+")")
	got := events(until(t, s, sentinel))
	if len(got) != 2 || got[0].Malformed == nil || got[0].Position.Done != 1 || got[1].Malformed != nil {
		t.Errorf("events %+v, want the first malformed and counted", got)
	}
}

func TestSeveralTablesShareTheOrderOfTheirTransactions(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, "CREATE TABLE second (LIKE outbox INCLUDING ALL)")
	cfg.Tables = append(cfg.Tables, Table{Name: "public.second"})
	s, _ := begin(t, cfg)
	pgtest.Exec(t, dsn, "BEGIN; INSERT INTO outbox VALUES (1); INSERT INTO second VALUES (1); INSERT INTO outbox VALUES ("+sentinel+"); COMMIT")
	var got []string
	for _, e := range events(until(t, s, sentinel)) {
		got = append(got, e.Table+" "+e.ID+" "+strconv.FormatUint(e.Position.Done, 10))
	}
	if want := []string{"public.outbox 1 1", "public.second 1 2", "public.outbox " + sentinel + " 3"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}
