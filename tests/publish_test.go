package tests

import (
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

func TestPayloadArrivesAsPostgreSQLPrintsIt(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	rabbittest.Queue(t, url, name, name+".order", "#", nil)
	insert := `INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version, headers, tenant)
		VALUES ($1, 'order', 'o-1', 'Changed', '{"n":12345678901234567890,"a":2.50}', $2, '{"source":"shop"}', 'acme')`
	conn := pgtest.Connect(t, dsn)
	// One row from the snapshot, one from the log.
	if _, err := conn.Exec(t.Context(), insert, "00000000-0000-0000-0000-000000000001", 1); err != nil {
		t.Fatal(err)
	}
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().State == "streaming" })
	if _, err := conn.Exec(t.Context(), insert, "00000000-0000-0000-0000-000000000002", 2); err != nil {
		t.Fatal(err)
	}
	want := pgtest.Query[string](t, dsn, "SELECT payload::text FROM outbox LIMIT 1")
	origins := []string{"snapshot", "wal"}
	for i, d := range rabbittest.Drain(t, url, name, 2, time.Minute) {
		if string(d.Body) != want || want != `{"a": 2.50, "n": 12345678901234567890}` {
			t.Errorf("body %s, PostgreSQL prints %s", d.Body, want)
		}
		if d.RoutingKey != "o-1" || d.Type != "Changed" || d.DeliveryMode != amqp.Persistent || d.ContentType != "application/json" {
			t.Errorf("properties: %+v", d)
		}
		for header, value := range map[string]any{
			"aggregate_type": "order", "aggregate_id": "o-1", "aggregate_version": int64(i + 1), "tenant": "acme",
			"origin": origins[i], "source": "shop",
		} {
			if d.Headers[header] != value {
				t.Errorf("message %d: header %s is %v, want %v", i, header, d.Headers[header], value)
			}
		}
	}
}

// What the broker cannot route is never taken for published, holds nobody else
// up, and arrives when it can.
func TestUnroutableEventsWaitAlone(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	rabbittest.Queue(t, url, name+"-good", name+".good", "#", nil)
	rabbittest.Queue(t, url, name+"-narrow", name+".narrow", "bound", nil)
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { st := c.status(); return st.Ready && st.State == "streaming" })
	insert := func(kind, id string, from, to int) {
		conn := pgtest.Connect(t, dsn)
		if _, err := conn.Exec(t.Context(), `INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
			SELECT gen_random_uuid(), $1, $2, 'Changed', '{}', g FROM generate_series($3::int, $4::int) g`, kind, id, from, to); err != nil {
			t.Fatal(err)
		}
	}
	insert("missing", "m", 1, 10)  // no such exchange
	insert("narrow", "lost", 1, 5) // an exchange, but no queue for that key
	insert("narrow", "bound", 1, 5)
	insert("good", "g", 1, 50)
	rabbittest.Drain(t, url, name+"-good", 50, time.Minute)
	rabbittest.Drain(t, url, name+"-narrow", 5, time.Minute)
	eventually(t, time.Minute, "two aggregates wait", func() bool {
		st := c.status()
		return st.Relay.WaitingAggregates == 2 && st.Relay.Pending == 15 && st.Counters.Confirmed == 55
	})
	insert("missing", "m", 11, 20)
	insert("good", "g", 51, 60)
	rabbittest.Drain(t, url, name+"-good", 10, time.Minute)
	saved := pgtest.Query[bool](t, dsn, "SELECT confirmed_flush_lsn < pg_current_wal_lsn() FROM pg_replication_slots WHERE slot_name = $1", name)
	if !saved {
		t.Error("the slot has passed unpublished events")
	}

	rabbittest.Queue(t, url, name+"-missing", name+".missing", "#", nil)
	rabbittest.Queue(t, url, name+"-lost", name+".narrow", "lost", nil)
	for queue, n := range map[string]int{name + "-missing": 20, name + "-lost": 5} {
		for i, d := range rabbittest.Drain(t, url, queue, n, time.Minute) {
			if d.Headers["aggregate_version"] != int64(i+1) {
				t.Errorf("%s: message %d has version %v", queue, i+1, d.Headers["aggregate_version"])
			}
		}
	}
	caughtUp(t, c, dsn, time.Minute)
	if n := messages(t, url, name+"-missing") + messages(t, url, name+"-lost") + messages(t, url, name+"-good"); n != 0 {
		t.Errorf("%d messages came twice", n)
	}
}
