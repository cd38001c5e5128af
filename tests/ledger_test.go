package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// aggregates is how many objects the writers fight over.
const aggregates = 20

// load is several writers that commit transactions of 1 to 1,000 outbox rows and
// roll some back. Each row's version is the one that its aggregate got in the
// same transaction, so versions are in commit order.
type load struct {
	t      *testing.T
	dsn    string
	cancel context.CancelFunc
	wg     sync.WaitGroup
	rows   atomic.Int64 // committed, as far as the writers know
}

// prepare makes the aggregates that the writers change.
func prepare(t *testing.T, dsn string) {
	t.Helper()
	pgtest.Exec(t, dsn,
		"CREATE TABLE agg (id int PRIMARY KEY, version bigint NOT NULL DEFAULT 0)",
		fmt.Sprintf("INSERT INTO agg SELECT generate_series(1, %d)", aggregates))
}

func startLoad(t *testing.T, dsn string, writers int, seed uint64, pause time.Duration) *load {
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{t: t, dsn: dsn, cancel: cancel}
	for w := range writers {
		rng := rand.New(rand.NewPCG(seed, uint64(w)))
		l.wg.Go(func() { l.write(ctx, rng, pause) })
	}
	t.Cleanup(l.stop)
	return l
}

func (l *load) stop() {
	l.cancel()
	l.wg.Wait()
}

// write goes on through outages of the server; whether a transaction in one of
// them was committed only the table knows.
func (l *load) write(ctx context.Context, rng *rand.Rand, pause time.Duration) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx)) // nothing more is expected of it
		}
	}()
	for ctx.Err() == nil {
		if conn == nil {
			c, err := pgx.Connect(ctx, l.dsn)
			if err != nil {
				wait(ctx, 50*time.Millisecond)
				continue
			}
			conn = c
		}
		n, err := transaction(ctx, conn, rng)
		if err != nil {
			_ = conn.Close(context.WithoutCancel(ctx)) // replaced by a new one
			conn = nil
			continue
		}
		l.rows.Add(int64(n))
		wait(ctx, time.Duration(rng.Int64N(int64(pause)+1)))
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// transaction writes rows of a few aggregates, locked in the order of their
// numbers, and rolls back one time in ten.
func transaction(ctx context.Context, conn *pgx.Conn, rng *rand.Rand) (int, error) {
	size := 1 + rng.IntN(20)
	if rng.IntN(20) == 0 {
		size = 1 + rng.IntN(1000)
	}
	picked := rng.Perm(aggregates)[:1+rng.IntN(3)]
	slices.Sort(picked)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	total := 0
	for i, a := range picked {
		n := size / len(picked)
		if i == 0 {
			n += size % len(picked)
		}
		if n == 0 {
			continue
		}
		total += n
		_, err := tx.Exec(ctx, `WITH a AS (UPDATE agg SET version = version + $2 WHERE id = $1 RETURNING id, version)
			INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
			SELECT gen_random_uuid(), 'order', a.id::text, 'Changed', jsonb_build_object('n', g), a.version - $2 + g
			FROM a, generate_series(1, $2::int) g`, a+1, n)
		if err != nil {
			return 0, err
		}
	}
	if rng.IntN(10) == 0 {
		return 0, tx.Rollback(ctx)
	}
	return total, tx.Commit(ctx)
}

// mark is the message that the ledger puts into the queue between two runs of
// the connector.
const mark = "mark"

// publishMark waits until the broker holds the mark.
func publishMark(t *testing.T, url, queue string) {
	t.Helper()
	ch := rabbittest.Channel(t, url)
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	dc, err := ch.PublishWithDeferredConfirmWithContext(t.Context(), "", queue, true, false, amqp.Publishing{MessageId: mark, DeliveryMode: amqp.Persistent})
	if err != nil {
		t.Fatal(err)
	}
	if !dc.Wait() {
		t.Fatal("the broker did not take the mark")
	}
}

// verdict is what the ledger found.
type verdict struct {
	committed, delivered, lost, phantom, reordered int
	duplicates                                     []int // by the runs that the marks separate
}

func (v verdict) String() string {
	sum := 0
	for _, d := range v.duplicates {
		sum += d
	}
	return fmt.Sprintf("committed=%d delivered=%d lost=%d phantom=%d reordered=%d duplicates=%d", v.committed, v.delivered, v.lost, v.phantom, v.reordered, sum)
}

// judge compares what is committed in the outbox with what the queue holds, in
// its order. It empties the queue.
func judge(t *testing.T, dsn, url, queue string) verdict {
	t.Helper()
	type row struct {
		aggregate string
		version   int64
	}
	committed := map[string]row{}
	rows, err := pgtest.Connect(t, dsn).Query(t.Context(), "SELECT id::text, aggregateid, version FROM outbox")
	if err != nil {
		t.Fatal(err)
	}
	var id string
	var r row
	_, err = pgx.ForEachRow(rows, []any{&id, &r.aggregate, &r.version}, func() error {
		committed[id] = r
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	v := verdict{committed: len(committed), duplicates: []int{0}}
	seen := map[string]bool{}
	last := map[string]int64{}
	for _, d := range drain(t, url, queue) {
		if d.MessageId == mark {
			v.duplicates = append(v.duplicates, 0)
			continue
		}
		c, ok := committed[d.MessageId]
		switch {
		case !ok:
			v.phantom++
		case seen[d.MessageId]:
			v.duplicates[len(v.duplicates)-1]++
		default:
			seen[d.MessageId] = true
			if c.version != last[c.aggregate]+1 {
				v.reordered++
			}
			last[c.aggregate] = c.version
			if d.Headers["aggregate_id"] != c.aggregate || d.Headers["aggregate_version"] != c.version {
				t.Errorf("message %s says %v version %v, its row %s version %d", d.MessageId, d.Headers["aggregate_id"], d.Headers["aggregate_version"], c.aggregate, c.version)
			}
		}
	}
	v.delivered = len(seen)
	v.lost = v.committed - v.delivered
	return v
}

// drain empties a queue in its order, with one consumer.
func drain(t *testing.T, url, queue string) []amqp.Delivery {
	t.Helper()
	var all []amqp.Delivery
	for {
		n := messages(t, url, queue)
		if n == 0 {
			return all
		}
		all = append(all, rabbittest.Drain(t, url, queue, min(n, 5000), time.Minute)...)
	}
}

// messages is the number of messages that are ready in the queue.
func messages(t *testing.T, url, queue string) int {
	t.Helper()
	q, err := rabbittest.Channel(t, url).QueueDeclarePassive(queue, true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	return q.Messages
}

// caughtUp waits until everything that is committed now is published and saved.
func caughtUp(t *testing.T, c *connector, dsn string, limit time.Duration) {
	t.Helper()
	target := pgtest.Query[int64](t, dsn, "SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")
	// Something behind it, which makes the server report that it got there.
	pgtest.Exec(t, dsn, "SELECT pg_logical_emit_message(true, 'tests', '')")
	rows := pgtest.Query[int64](t, dsn, "SELECT count(*) FROM outbox")
	began := time.Now()
	eventually(t, limit, fmt.Sprintf("%d rows published and saved up to %X", rows, target), func() bool {
		s := c.status()
		return s.State == "streaming" && s.Relay.Pending == 0 && s.stage("read") >= uint64(target) && s.stage("confirmed") >= uint64(target)
	})
	t.Logf("caught up with %d rows in %s", rows, time.Since(began).Round(time.Millisecond))
}
