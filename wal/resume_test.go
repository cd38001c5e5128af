package wal

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
)

// seed is random unless CDCPUB_TEST_SEED names one.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := rand.Uint64()
	if v := os.Getenv("CDCPUB_TEST_SEED"); v != "" {
		var err error
		if s, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seed %d (repeat with CDCPUB_TEST_SEED)", s)
	return s
}

// row is what a history knows of an event. The tenant comes from a column that
// comes and goes.
type row struct{ ID, Tenant, Payload string }

// history writes random transactions on several connections, whose statements
// interleave, and keeps what must come out: the rows of each, in commit order.
type history struct {
	t         *testing.T
	rand      *rand.Rand
	sessions  []*session
	lastID    int
	hasTenant bool
	columns   int
	committed []row
}

type session struct {
	conn *pgx.Conn
	open bool
	rows []row
}

func (h *history) payload() string {
	switch h.rand.IntN(60) {
	case 0:
		return strings.Repeat("b", 400_000) // a few of them fill a batch
	case 1, 2, 3:
		return ""
	default:
		return strings.Repeat("p", h.rand.IntN(300))
	}
}

func (h *history) row() row {
	h.lastID++
	r := row{ID: strconv.Itoa(h.lastID), Payload: h.payload()}
	if h.hasTenant {
		r.Tenant = "acme" // the column's default
	}
	return r
}

func (h *history) insert(s *session, n int) {
	h.t.Helper()
	if h.rand.IntN(3) == 0 {
		h.copy(s, n)
		return
	}
	for range n {
		r := h.row()
		exec(h.t, s.conn, "INSERT INTO outbox (id, payload) VALUES ($1, $2)", h.lastID, r.Payload)
		s.rows = append(s.rows, r)
	}
}

func (h *history) copy(s *session, n int) {
	h.t.Helper()
	values := make([][]any, n)
	for i := range values {
		r := h.row()
		values[i] = []any{int64(h.lastID), r.Payload}
		s.rows = append(s.rows, r)
	}
	if _, err := s.conn.CopyFrom(h.t.Context(), pgx.Identifier{"outbox"}, []string{"id", "payload"}, pgx.CopyFromRows(values)); err != nil {
		h.t.Fatal(err)
	}
}

// step does something in one session's transaction, or ends it.
func (h *history) step(s *session) {
	h.t.Helper()
	if !s.open {
		exec(h.t, s.conn, "BEGIN")
		s.open, s.rows = true, nil
	}
	switch h.rand.IntN(10) {
	case 0, 1, 2:
		h.insert(s, 1+h.rand.IntN(25))
	case 3: // a subtransaction that is kept, or not
		before := len(s.rows)
		exec(h.t, s.conn, "SAVEPOINT a")
		h.insert(s, 1+h.rand.IntN(10))
		if h.rand.IntN(2) == 0 {
			exec(h.t, s.conn, "ROLLBACK TO a")
			s.rows = s.rows[:before]
		}
		exec(h.t, s.conn, "RELEASE a")
	case 4: // rows of its own, so that it waits for nobody
		if n := len(s.rows); n > 0 {
			exec(h.t, s.conn, "UPDATE outbox SET payload = 'changed later' WHERE id = "+s.rows[h.rand.IntN(n)].ID)
			exec(h.t, s.conn, "DELETE FROM outbox WHERE id = "+s.rows[h.rand.IntN(n)].ID)
		}
	case 5:
		exec(h.t, s.conn, "INSERT INTO other SELECT generate_series(1, 20)")
	case 6:
		exec(h.t, s.conn, "ROLLBACK")
		s.open = false
	default:
		h.commit(s)
	}
}

func (h *history) commit(s *session) {
	h.t.Helper()
	if !s.open {
		return
	}
	exec(h.t, s.conn, "COMMIT")
	h.committed = append(h.committed, s.rows...)
	s.open = false
}

// alone ends all transactions and changes the table, which no other session may
// hold meanwhile, between the rows of one more.
func (h *history) alone() {
	h.t.Helper()
	for _, s := range h.sessions {
		h.commit(s)
	}
	s := h.sessions[0]
	exec(h.t, s.conn, "BEGIN")
	s.open, s.rows = true, nil
	h.insert(s, h.rand.IntN(5))
	switch h.rand.IntN(4) {
	case 0:
		exec(h.t, s.conn, "TRUNCATE outbox")
	case 1: // a volatile default rewrites the table: its rows are not new ones
		h.columns++
		exec(h.t, s.conn, fmt.Sprintf("ALTER TABLE outbox ADD COLUMN c%d timestamptz DEFAULT clock_timestamp()", h.columns))
	default:
		if h.hasTenant {
			exec(h.t, s.conn, "ALTER TABLE outbox DROP COLUMN tenant")
		} else {
			exec(h.t, s.conn, "ALTER TABLE outbox ADD COLUMN tenant text DEFAULT 'acme'")
		}
		h.hasTenant = !h.hasTenant
	}
	// Statements prepared before the change would be planned anew with an error.
	if err := s.conn.DeallocateAll(h.t.Context()); err != nil {
		h.t.Fatal(err)
	}
	h.insert(s, h.rand.IntN(5))
	h.commit(s)
}

func (h *history) run(steps int) {
	h.t.Helper()
	for range steps {
		if h.rand.IntN(15) == 0 {
			h.alone()
		} else {
			h.step(h.sessions[h.rand.IntN(len(h.sessions))])
		}
	}
	for _, s := range h.sessions {
		h.commit(s)
	}
}

// From every position that a stream has handed out, another stream goes on with
// exactly the rest: that is what a restart rests on.
func TestResumeFromAnyPositionBringsExactlyTheRest(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(seed(t), 1))
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, "CREATE TABLE other (id int)")
	s, pos := begin(t, cfg)
	h := &history{t: t, rand: random}
	for range 4 {
		h.sessions = append(h.sessions, &session{conn: pgtest.Connect(t, dsn)})
	}
	h.run(150)
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, payload) VALUES ("+sentinel+", '')")
	want := h.committed
	last := row{ID: sentinel}
	if h.hasTenant {
		last.Tenant = "acme"
	}
	want = append(want, last)

	// places are where one can stop: after each event, and where batches end.
	type place struct {
		pos  offsets.Position
		seen int
	}
	var places []place
	positions := map[string]offsets.Position{}
	var got []row
	restart, previous := pos.LSN, offsets.Position{}
	for _, b := range until(t, s, sentinel) {
		for _, e := range b.Events {
			p := e.Position
			if p.LSN < restart || p.Tx < p.LSN || p.Tx < previous.Tx || p.Last != (offsets.Row{Table: "public.outbox", ID: e.ID}) {
				t.Fatalf("event %s is at %+v, after %+v and restart point %s", e.ID, p, previous, restart)
			}
			if ordinal := previous.Done + 1; (p.Tx == previous.Tx && p.Done != ordinal) || (p.Tx != previous.Tx && p.Done != 1) {
				t.Fatalf("event %s is at %+v, after %+v", e.ID, p, previous)
			}
			if time.Since(e.CommittedAt) > time.Hour {
				t.Fatalf("event %s was committed at %s", e.ID, e.CommittedAt)
			}
			previous, positions[e.ID] = p, p
			got = append(got, row{e.ID, e.Aggregate.Tenant, string(e.Payload)})
			places = append(places, place{p, len(got)})
		}
		if b.Through.LSN < restart {
			t.Fatalf("the stream went back from %s to %s", restart, b.Through)
		}
		restart = b.Through.LSN
		places = append(places, place{b.Through, len(got)})
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("events (-want +got):\n%s", d)
	}
	s.Close()

	// In rising order, because a stream that starts at a position acknowledges it.
	chosen := random.Perm(len(places) - 2)[:min(15, len(places)-2)]
	slices.Sort(chosen)
	for _, i := range chosen {
		p := places[i]
		if p.seen == len(want) {
			continue
		}
		s := startAgain(t, cfg, p.pos)
		var rest []row
		for _, e := range events(until(t, s, sentinel)) {
			rest = append(rest, row{e.ID, e.Aggregate.Tenant, string(e.Payload)})
			// A restart point in between may differ: keepalives come as they please.
			if at, first := e.Position, positions[e.ID]; at.Tx != first.Tx || at.Done != first.Done || at.LSN < p.pos.LSN {
				t.Fatalf("resumed at %s, event %s is at %s; it was at %s before", p.pos, e.ID, at, first)
			}
		}
		if d := cmp.Diff(want[p.seen:], rest); d != "" {
			t.Fatalf("resumed after %d events at %s: (-want +got):\n%s", p.seen, p.pos, d)
		}
		if got := s.Stats(); got.Skipped != p.pos.Done {
			t.Errorf("resumed at %s, counted %d skipped events", p.pos, got.Skipped)
		}
		s.Close()
	}
	t.Logf("%d events, %d places, %d of them tried", len(want), len(places), len(chosen))
}

func TestResumeInsideATransactionThatTheLogDoesNotHaveIsRefused(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	s, pos := begin(t, cfg)
	s.Close()
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, payload) VALUES ("+sentinel+", '')")
	s = startAgain(t, cfg, offsets.Position{LSN: pos.LSN, Tx: pos.LSN + 1, Done: 1})
	for b := range s.Batches() {
		if len(b.Events) > 0 {
			t.Fatalf("event %s was handed on", b.Events[0].ID)
		}
	}
	var refusal *Refusal
	if err := s.Err(); !errors.As(err, &refusal) || refusal.Cause != Gap {
		t.Errorf("Err = %v, want a refusal", err)
	}
}
