package wal

import (
	"errors"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/offsets"
)

func TestKeepaliveOnTheWayBackIntoATransactionKeepsItsProgress(t *testing.T) {
	inside := offsets.Position{LSN: 100, Tx: 200, Done: 5, Last: offsets.Row{Table: "public.outbox", ID: "x"}}
	for name, tc := range map[string]struct {
		walEnd offsets.LSN
		urgent bool
		want   offsets.Position
	}{
		"before the transaction":            {150, false, offsets.Position{LSN: 150, Tx: 200, Done: 5, Last: inside.Last}},
		"at its commit record":              {200, false, offsets.Position{LSN: 200, Tx: 200, Done: 5, Last: inside.Last}},
		"behind it, as if it were not ours": {250, false, offsets.Position{LSN: 250}},
		"while the server asks for it":      {150, true, offsets.Position{LSN: 150, Tx: 200, Done: 5, Last: inside.Last}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Stream{reader: newReader(inside, nil)}
			if err := s.keepalive(tc.walEnd, tc.urgent); err != nil {
				t.Fatal(err)
			}
			if s.batch.Through != tc.want || s.batch.Urgent != tc.urgent {
				t.Errorf("progress %+v urgent %t, want %+v", s.batch.Through, s.batch.Urgent, tc.want)
			}
		})
	}
}

// A server that stops asks several times a second.
func TestReplyRequestsFarApartAreNoShutdown(t *testing.T) {
	s := &Stream{reader: newReader(offsets.Position{LSN: 100}, nil)}
	ask := func() error { return s.keepalive(150, true) }
	for range 3 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
		s.askedSince, s.askedLast = s.askedSince.Add(-12*time.Second), s.askedLast.Add(-12*time.Second)
	}
	for range 2 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	s.askedSince = s.askedSince.Add(-stopPatience)
	if err := ask(); !errors.Is(err, ErrServerStopping) {
		t.Errorf("after %s of asking: %v", stopPatience, err)
	}
}

func TestRowsOfARenamedTableAreStillOurs(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	s, _ := begin(t, configure(t, dsn))
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, payload) VALUES (1, '')", "ALTER TABLE outbox RENAME TO outbox_v1",
		"CREATE VIEW outbox AS SELECT * FROM outbox_v1", "INSERT INTO outbox (id, payload) VALUES (2, '')",
		"INSERT INTO outbox_v1 (id, payload) VALUES ("+sentinel+", '')")
	for i, e := range events(until(t, s, sentinel)) {
		if want := []string{"1", "2", sentinel}[i]; e.ID != want || e.Table != "public.outbox" {
			t.Errorf("event %s of %s, want %s of public.outbox", e.ID, e.Table, want)
		}
	}
}

func TestTableThatWasMadeAnewIsRefused(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn, "CREATE PUBLICATION cdcpub FOR ALL TABLES")
	c := connect(t, cfg)
	s := start(t, c, createSlot(t, c))
	pgtest.Exec(t, dsn, "DROP TABLE outbox", outboxTable, "INSERT INTO outbox (id, payload) VALUES (1, '')")
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
