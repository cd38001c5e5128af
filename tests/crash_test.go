package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// The defaults that bound the duplicates of a crash: what was at the broker,
// what was confirmed since the last checkpoint, and one batch.
const duplicatesPerCrash = 2048 + 2000 + 256

// seed is random unless CDCPUB_TEST_SEED names one.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := rand.Uint64()
	if v := os.Getenv("CDCPUB_TEST_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		s = n
	}
	t.Logf("seed %d (repeat with CDCPUB_TEST_SEED)", s)
	return s
}

func quorum() amqp.Table { return amqp.Table{"x-queue-type": "quorum"} }

// startBroker starts a broker with room for a backlog: its alarms are another
// test's affair.
func startBroker(t *testing.T) *rabbittest.Server {
	return rabbittest.Start(t, rabbittest.Setting("vm_memory_high_watermark.absolute", "4GB"))
}

// Kill -9 at random moments: during the very first start, in the snapshot, and
// twenty times under load.
func TestKilledConnectorLosesNothing(t *testing.T) {
	t.Parallel()
	const firstStarts, snapshots, streaming, oldRows = 4, 3, 20, 20_000
	s := seed(t)
	rng := rand.New(rand.NewPCG(s, 99))
	pg, mq := pgtest.Start(t), startBroker(t)
	dsn, url, name := pg.DSN("postgres"), mq.URL(), "crash"
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	prepare(t, dsn)
	rabbittest.Queue(t, url, name, name+".order", "#", quorum())
	pgtest.Exec(t, dsn, "UPDATE agg SET version = "+strconv.Itoa(oldRows/aggregates), fmt.Sprintf(
		`INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
		 SELECT gen_random_uuid(), 'order', a::text, 'Changed', '{}', v FROM generate_series(1, %d) a, generate_series(1, %d) v`, aggregates, oldRows/aggregates))

	kill := func() {
		c.kill()
		publishMark(t, url, name)
	}
	for range firstStarts {
		c.start()
		wait(t.Context(), time.Duration(rng.Int64N(int64(150*time.Millisecond))))
		kill()
	}
	for range snapshots {
		c.start()
		eventually(t, time.Minute, "rows of the snapshot are confirmed", func() bool {
			st := c.status()
			return st.State == "snapshot" && st.Counters.Confirmed > 500
		})
		kill()
	}
	c.start()
	eventually(t, time.Minute, "the snapshot is complete", func() bool { return c.status().State == "streaming" })
	l := startLoad(t, dsn, 4, s, 50*time.Millisecond)
	wait(t.Context(), time.Second)
	for range streaming {
		kill()
		c.start()
		wait(t.Context(), time.Duration(rng.Int64N(int64(2500*time.Millisecond))))
	}
	l.stop()
	caughtUp(t, c, dsn, 2*time.Minute)
	if took := c.stop(); took > 10*time.Second {
		t.Errorf("SIGTERM took %s", took)
	}
	v := judge(t, dsn, url, name)
	worst := 0
	for _, d := range v.duplicates[firstStarts+snapshots+1:] {
		worst = max(worst, d)
	}
	t.Logf("kills=%d %s, duplicates by run %v, worst after the snapshot %d of %d allowed", len(v.duplicates)-1, v, v.duplicates, worst, duplicatesPerCrash)
	if v.lost != 0 || v.phantom != 0 || v.reordered != 0 || v.committed < oldRows+int(l.rows.Load()) {
		t.Errorf("the ledger disagrees: %s", v)
	}
	if worst > duplicatesPerCrash {
		t.Errorf("%d duplicates after one kill", worst)
	}
}

// Everything around the connector restarts under load while it stays up.
func TestRestartedServersLoseNothing(t *testing.T) {
	t.Parallel()
	s := seed(t)
	pg, mq := pgtest.Start(t), startBroker(t)
	dsn, url, name := pg.DSN("postgres"), mq.URL(), "restarts"
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	prepare(t, dsn)
	rabbittest.Queue(t, url, name, name+".order", "#", quorum())
	c.start()
	eventually(t, time.Minute, "the connector is ready", func() bool { return c.status().Ready })
	l := startLoad(t, dsn, 3, s, 50*time.Millisecond)

	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	stopDatabase := func(mode pgtest.Mode, what string) {
		took, err := pg.Stop(mode)
		check(err)
		t.Logf("%s: PostgreSQL stopped in %s", what, took.Round(time.Millisecond))
		if took > 5*time.Second {
			t.Errorf("%s: the stop was held up for %s", what, took)
		}
	}
	flows := func(what string) {
		t.Helper()
		before := c.status().Counters.Confirmed
		eventually(t, time.Minute, what+": events are confirmed again", func() bool {
			st := c.status()
			return st.Ready && st.Counters.Confirmed > before+100
		})
	}
	pid := c.proc.PID()
	for _, step := range []struct {
		what string
		do   func()
	}{
		{"broker restart", func() { _, err := mq.Stop(); check(err); check(mq.Start()) }},
		{"broker kill", func() { check(mq.Kill()); check(mq.Start()) }},
		{"fast restart", func() { stopDatabase(pgtest.Fast, "fast restart"); check(pg.Start()) }},
		{"immediate restart", func() { stopDatabase(pgtest.Immediate, "immediate restart"); check(pg.Start()) }},
		{"database kill", func() { check(pg.Kill()); check(pg.Start()) }},
		{"fast restart while the broker is down", func() {
			_, err := mq.Stop()
			check(err)
			// Until the window is full and the connector no longer reads.
			rows := l.rows.Load()
			eventually(t, time.Minute, "the backlog grows", func() bool { return l.rows.Load() > rows+10_000 })
			stopDatabase(pgtest.Fast, "with the broker down")
			check(pg.Start())
			check(mq.Start())
		}},
	} {
		flows("before " + step.what)
		step.do()
		flows(step.what)
	}
	l.stop()
	caughtUp(t, c, dsn, 2*time.Minute)
	if c.proc.PID() != pid || !c.proc.Running() {
		t.Error("the connector did not stay up")
	}
	c.stop()
	v := judge(t, dsn, url, name)
	t.Log(v)
	if v.lost != 0 || v.phantom != 0 || v.reordered != 0 || v.committed < int(l.rows.Load()) {
		t.Errorf("the ledger disagrees: %s", v)
	}
}

// A transaction is never collected in memory.
func TestLargeTransactionStaysSmall(t *testing.T) {
	t.Parallel()
	const rows, limit = 200_000, 100 << 20
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	rabbittest.Queue(t, url, name, name+".order", "#", nil)
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { st := c.status(); return st.Ready && st.State == "streaming" })
	pgtest.Exec(t, dsn, fmt.Sprintf(`INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
		SELECT gen_random_uuid(), 'order', g::text, 'Changed', jsonb_build_object('text', repeat('x', 300)), 1 FROM generate_series(1, %d) g`, rows))
	began := time.Now()
	caughtUp(t, c, dsn, 3*time.Minute)
	peak := c.peakMemory()
	took := time.Since(began)
	t.Logf("%d rows of one transaction in %s (%.0f/s), peak resident memory %.1f MB", rows, took.Round(time.Millisecond), rows/took.Seconds(), float64(peak)/(1<<20))
	if peak > limit {
		t.Errorf("peak resident memory %d bytes, limit %d", peak, limit)
	}
	if got := c.status().Counters.Confirmed; got != rows {
		t.Errorf("%d confirmed", got)
	}
	eventually(t, time.Minute, "the queue holds every row", func() bool { return messages(t, url, name) == rows })
}

// An outbox without traffic does not hold WAL back.
func TestIdleOutboxReleasesWAL(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, url, name)
	c.must("init", "--create-table")
	pgtest.Exec(t, dsn, "CREATE TABLE other (x text)")
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			pgtest.Exec(t, dsn, "INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 100)")
			wait(ctx, 50*time.Millisecond)
		}
	}()
	// Twice: the first time may profit from the start.
	for range 2 {
		target := pgtest.Query[string](t, dsn, "SELECT pg_current_wal_insert_lsn()::text")
		began := time.Now()
		eventually(t, 15*time.Second, "confirmed_flush_lsn follows", func() bool {
			return pgtest.Query[bool](t, dsn, "SELECT confirmed_flush_lsn >= $1::pg_lsn FROM pg_replication_slots WHERE slot_name = $2", target, name)
		})
		t.Logf("confirmed_flush_lsn followed %s in %s", target, time.Since(began).Round(time.Millisecond))
	}
	cancel()
	<-done
}
