package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// With the same configuration it will never be published, so looking again would
// only repeat what is around it.
func TestEventThatCanNeverBePublishedStopsWithoutRepeating(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ before, after string }{
		"among the old rows": {before: "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', '', 'Changed', '{}', 500)"},
		"in the stream":      {after: "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', repeat('x', 300), 'Changed', '{}', 1)"},
	} {
		t.Run(name, func(t *testing.T) {
			dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
			c := newConnector(t, dsn, url, name)
			c.must("init", "--create-table")
			rabbittest.Queue(t, url, name, name+".order", "#", nil)
			rows := `INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
				SELECT gen_random_uuid(), 'order', 'a', 'Changed', '{}', g FROM generate_series(1, 100) g`
			// The recommended table would not take such rows.
			pgtest.Exec(t, dsn, "ALTER TABLE outbox DROP CONSTRAINT outbox_aggregateid_check, ALTER aggregateid TYPE text")
			if tc.before != "" {
				pgtest.Exec(t, dsn, rows, tc.before)
			}
			c.start()
			if tc.after != "" {
				eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
				pgtest.Exec(t, dsn, rows, tc.after)
			}
			eventually(t, time.Minute, "it is refused", func() bool {
				s := c.status()
				return s.Refusal != nil && s.Refusal.Code == "policy" && strings.Contains(s.Refusal.Hint, "start run anew")
			})
			// Longer than any other refusal is left alone.
			wait(t.Context(), 7*time.Second)
			if n := messages(t, url, name); n != 100 {
				t.Errorf("%d messages of 100 rows", n)
			}
			if s := c.status(); s.State != "refused" {
				t.Errorf("state %s", s.State)
			}
			if took := c.stop(); took > 2*time.Second {
				t.Errorf("SIGTERM took %s", took)
			}
		})
	}
}

// Two replicas with a volume each and the same names: one wins, and the other
// must not take the slot over later.
func TestTwoFirstStartsAtOnce(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	a, b := newConnector(t, dsn, url, name), newConnector(t, dsn, url, name)
	a.must("init", "--create-table")
	rabbittest.Queue(t, url, name, name+".order", "#", nil)
	row := "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', 'a', 'Changed', '{}', "
	pgtest.Exec(t, dsn, row+"1)")
	// An open transaction holds the first in CREATE_REPLICATION_SLOT, so that the
	// second meets a slot in the making.
	conn := pgtest.Connect(t, dsn)
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT pg_current_xact_id()"); err != nil {
		t.Fatal(err)
	}
	a.start()
	b.start()
	winner, loser := a, b
	refused := func() bool { s := loser.status(); return s.State == "refused" && s.Refusal.Code == "gap" }
	eventually(t, time.Minute, "one creates the slot and the other is refused", func() bool {
		if winner.status().State != "creating" {
			winner, loser = loser, winner
		}
		return winner.status().State == "creating" && refused()
	})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the one streams and the other stays refused", func() bool { return winner.status().State == "streaming" && refused() })
	winner.stop()
	// Longer than a refusal is left alone.
	wait(t.Context(), 7*time.Second)
	if s := loser.status(); s.State != "refused" {
		t.Errorf("the loser is %s after the winner stopped", s.State)
	}
	pgtest.Exec(t, dsn, row+"2)")
	winner.start()
	caughtUp(t, winner, dsn, time.Minute)
	if n := messages(t, url, name); n != 2 {
		t.Errorf("%d messages of 2 rows", n)
	}
}

func TestTeardownSparesAnotherConnector(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
	other := newConnector(t, dsn, url, name)
	if _, stderr, code := other.cli("teardown", "--yes"); code != 1 || !strings.Contains(stderr, "in use") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	c.stop()
	c.env["CDCPUB_SOURCE_PUBLICATION"] = "another"
	if _, stderr, code := c.cli("teardown", "--yes"); code != 1 || !strings.Contains(stderr, "nothing was dropped") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	c.env["CDCPUB_SOURCE_PUBLICATION"] = name
	c.streamOnce()
	if _, stderr, code := other.cli("teardown", "--yes"); code != 1 || !strings.Contains(stderr, "--without-state") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	other.must("teardown", "--yes", "--without-state")
	if n := pgtest.Query[int](t, dsn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", name); n != 0 {
		t.Error("the slot is still there")
	}
}

// Whoever takes the walsender away during the snapshot takes the lock away.
func TestLostStreamEndsTheSnapshot(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', 'a', 'Changed', '{}', 1)")
	c.start() // nobody takes the row
	eventually(t, time.Minute, "the snapshot waits", func() bool { s := c.status(); return s.State == "snapshot" && s.Relay.WaitingAggregates == 1 })
	pgtest.Exec(t, dsn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '"+name+"'")
	eventually(t, time.Minute, "it starts again", func() bool {
		return pgtest.Query[int](t, dsn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1 AND active", name) == 1 &&
			c.status().Counters.EventsRead >= 2
	})
	rabbittest.Queue(t, url, name, name+".order", "#", nil)
	rabbittest.Drain(t, url, name, 1, time.Minute)
	caughtUp(t, c, dsn, time.Minute)
}
