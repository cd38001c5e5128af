package service_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/examples/orders/service"
	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/outbox"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// database has the tables of the service and the connector's recommended outbox.
func database(t *testing.T) (dsn string) {
	t.Helper()
	dsn = pgtest.Database(t)
	pgtest.Exec(t, dsn, service.Schema, outbox.DDL("public", "outbox"))
	return dsn
}

func open(t *testing.T, dsn string) *service.Service {
	t.Helper()
	return &service.Service{DB: pgtest.Connect(t, dsn)}
}

func place(t *testing.T, s *service.Service) int64 {
	t.Helper()
	e, err := s.Place(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}
	return e.OrderID
}

// versions returns the versions of an order's events.
func versions(t *testing.T, dsn string, id int64) []int64 {
	t.Helper()
	return pgtest.Query[[]int64](t, dsn, `SELECT coalesce(array_agg(version ORDER BY version), '{}')
		FROM outbox WHERE aggregatetype = 'order' AND aggregateid = $1::bigint::text`, id)
}

func TestConcurrentChangesOfOneOrderGiveVersionsWithoutGaps(t *testing.T) {
	t.Parallel()
	const workers, each = 4, 25
	dsn := database(t)
	id := place(t, open(t, dsn))
	var wg sync.WaitGroup
	for range workers {
		s := open(t, dsn)
		wg.Go(func() {
			for done := 0; done < each; {
				_, err := s.AddItem(t.Context(), id, 1)
				switch {
				case err == nil:
					done++
				case !errors.Is(err, service.ErrBusy):
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	var want []int64
	for v := range int64(workers*each + 1) {
		want = append(want, v+1)
	}
	if got := versions(t, dsn, id); !slices.Equal(got, want) {
		t.Errorf("versions %d, want 1 to %d", got, len(want))
	}
	if got := pgtest.Query[int64](t, dsn, `SELECT version FROM orders WHERE id = $1`, id); got != int64(len(want)) {
		t.Errorf("the order has version %d, want %d", got, len(want))
	}
	if got := pgtest.Query[int64](t, dsn, `SELECT amount FROM orders WHERE id = $1`, id); got != 100+workers*each {
		t.Errorf("the order has amount %d, want %d", got, 100+workers*each)
	}
}

func TestARolledBackChangeLeavesNeitherAnEventNorAChange(t *testing.T) {
	t.Parallel()
	dsn := database(t)
	s := open(t, dsn)
	id := place(t, s)
	e, err := s.AddItem(t.Context(), id, service.Limit)
	if !errors.Is(err, service.ErrOverLimit) {
		t.Fatalf("got %v, want %v", err, service.ErrOverLimit)
	}
	// That it got a version shows that its row was written, and not only refused.
	if e.Version != 2 {
		t.Errorf("the event was tried with version %d, want 2", e.Version)
	}
	if got := versions(t, dsn, id); !slices.Equal(got, []int64{1}) {
		t.Errorf("events of versions %d, want 1 alone", got)
	}
	if got := pgtest.Query[string](t, dsn, `SELECT amount || ' v' || version FROM orders WHERE id = $1`, id); got != "100 v1" {
		t.Errorf("the order is %s, want 100 v1", got)
	}
	// The version that was rolled back is given to the next change.
	if e, err := s.AddItem(t.Context(), id, 1); err != nil || e.Version != 2 {
		t.Errorf("the next change is version %d (%v), want 2", e.Version, err)
	}
}

func TestALostUpdateIsRetriedWithTheSameEvent(t *testing.T) {
	t.Parallel()
	dsn := database(t)
	id := place(t, open(t, dsn))
	other := pgtest.Connect(t, dsn)
	watch := pgtest.Connect(t, dsn)
	tx, err := other.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE orders SET amount = 500, version = 2 WHERE id = $1`, id); err != nil {
		t.Fatal(err)
	}
	conn := pgtest.Connect(t, dsn)
	blocked := conn.PgConn().PID()
	type result struct {
		event service.Event
		err   error
	}
	done := make(chan result, 1)
	go func() {
		s := &service.Service{DB: conn}
		e, err := s.Pay(t.Context(), id)
		done <- result{e, err}
	}()
	// It has read version 1 once it waits for the row.
	awaitLock(t, watch, blocked)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := <-done
	if got.err != nil || got.event.Version != 3 {
		t.Fatalf("got version %d (%v), want 3", got.event.Version, got.err)
	}
	const row = `SELECT id || ' ' || version || ' ' || kind || ' ' || (payload->>'amount') FROM outbox WHERE type = 'OrderPaid'`
	if stored, want := pgtest.Query[string](t, dsn, row), got.event.ID.String()+" 3 snapshot 500"; stored != want {
		t.Errorf("stored %q, want %q: the second try must see what the first missed", stored, want)
	}
}

func TestAPaidOrderIsNotChanged(t *testing.T) {
	t.Parallel()
	dsn := database(t)
	s := open(t, dsn)
	id := place(t, s)
	if _, err := s.Pay(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := s.AddItem(t.Context(), id, 1); !errors.Is(err, service.ErrPaid) {
		t.Errorf("got %v, want %v", err, service.ErrPaid)
	}
	if got := versions(t, dsn, id); !slices.Equal(got, []int64{1, 2}) {
		t.Errorf("events of versions %d, want 1 and 2", got)
	}
}

func awaitLock(t *testing.T, conn *pgx.Conn, pid uint32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		var waits bool
		err := conn.QueryRow(ctx, `SELECT coalesce(wait_event_type = 'Lock', false) FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&waits)
		if err != nil {
			t.Fatal(err)
		}
		if waits {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			t.Fatal("the change does not wait for the other transaction")
		}
	}
}
