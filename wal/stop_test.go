package wal

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/faultproxy"
	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/outbox"
)

// stopLimit is how long a server's administrator may wait because of us.
const stopLimit = 5 * time.Second

// backlog is more than the sockets between server and stream hold: some 20 MB.
const backlog = "INSERT INTO outbox (id, payload) SELECT n, repeat('x', 1000) FROM generate_series(1, 20000) n"

func stop(t *testing.T, srv *pgtest.Server, mode pgtest.Mode) {
	t.Helper()
	took, err := srv.Stop(mode)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the server took %s to stop", took.Round(time.Millisecond))
	if took > stopLimit {
		t.Errorf("the server took %s to stop, want at most %s", took, stopLimit)
	}
}

// drain takes everything until the stream ends, acknowledges it if asked to, and
// sends what Err said.
func drain(s *Stream, ack bool) <-chan error {
	ended := make(chan error, 1)
	go func() {
		for b := range s.Batches() {
			if ack && b.Through.Tx.IsZero() {
				s.Ack(b.Through.LSN)
			}
		}
		ended <- s.Err()
	}()
	return ended
}

func await(t *testing.T, ended <-chan error) error {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-ended:
		return err
	case <-timer.C:
		t.Fatalf("the stream goes on %s after its server's end", limit)
		return nil
	}
}

// awaitSent waits until the server has handed the whole log to its sockets.
func awaitSent(t *testing.T, s *Stream, dsn string) {
	t.Helper()
	end := parseLSN(t, pgtest.Query[string](t, dsn, "SELECT pg_current_wal_flush_lsn()::text"))
	eventually(t, "the stream has read the log", func() bool { return s.Stats().Received >= end })
}

// awaitBlocked waits until the stream holds a batch that nobody takes and the
// walsender has filled the sockets: it makes no more progress.
func awaitBlocked(t *testing.T, dsn, slot string) {
	t.Helper()
	eventually(t, "the walsender waits for a full socket", func() bool {
		return pgtest.Query[bool](t, dsn, `SELECT count(*) = 1 FROM pg_stat_activity JOIN pg_replication_slots ON pid = active_pid
			WHERE slot_name = $1 AND wait_event = 'WalSenderWriteData'`, slot)
	})
}

func TestFastShutdownDoesNotWaitForUs(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	dsn := srv.DSN("postgres")
	cfg := configure(t, dsn)
	cfg.Slot = "cdcpub"
	c := connect(t, cfg)
	pos := create(t, c)

	t.Run("when everything is taken and acknowledged", func(t *testing.T) {
		s := start(t, c, pos)
		ended := drain(s, true)
		pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (0)")
		stop(t, srv, pgtest.Fast)
		if err := await(t, ended); err == nil {
			t.Error("the stream ended without an error")
		} else {
			t.Log(err)
		}
	})
	restart(t, srv)
	pos.LSN = confirmedFlush(t, cfg)
	t.Run("when everything is taken and nothing acknowledged", func(t *testing.T) {
		s := startAgain(t, cfg, pos)
		ended := drain(s, false)
		pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (-1)")
		awaitSent(t, s, dsn)
		stop(t, srv, pgtest.Fast)
		if err := await(t, ended); !errors.Is(err, ErrServerStopping) {
			t.Errorf("the stream ended with %v, want %v", err, ErrServerStopping)
		}
	})
	restart(t, srv)
	t.Run("when the end of an idle log waits to be taken", func(t *testing.T) {
		s := startAgain(t, cfg, pos)
		// How many rows come again depends on the version: from 17 a shutdown
		// writes the slot's position down.
		for seen, within := false, true; !seen || within; {
			b := next(t, s)
			seen = seen || slices.ContainsFunc(b.Events, func(e outbox.Event) bool { return e.ID == "-1" })
			within = !b.Through.Tx.IsZero()
			s.Ack(b.Through.LSN)
		}
		pgtest.Exec(t, dsn, "INSERT INTO outbox VALUES (-2)")
		stop(t, srv, pgtest.Fast)
		if err := await(t, drain(s, false)); !errors.Is(err, ErrServerStopping) {
			t.Errorf("the stream ended with %v, want %v", err, ErrServerStopping)
		}
	})
	restart(t, srv)
	pos.LSN = confirmedFlush(t, cfg)
	t.Run("when nobody takes anything", func(t *testing.T) {
		s := startAgain(t, cfg, pos)
		pgtest.Exec(t, dsn, backlog)
		awaitBlocked(t, dsn, cfg.Slot)
		stop(t, srv, pgtest.Fast)
		if err := await(t, drain(s, false)); !errors.Is(err, ErrServerStopping) {
			t.Errorf("the stream ended with %v, want %v", err, ErrServerStopping)
		}
		if got := confirmedAfterRestart(t, srv, cfg); got != pos.LSN {
			t.Errorf("the slot moved to %s, want %s", got, pos)
		}
	})
	for name, sql := range map[string]string{
		"when a big transaction is taken slowly":     "INSERT INTO outbox (id, payload) SELECT n, repeat('x', 1000) FROM generate_series(20001, 40000) n",
		"when many small transactions are as slowly": "DO $$ BEGIN FOR n IN 40001..55000 LOOP INSERT INTO outbox (id, payload) VALUES (n, repeat('x', 1000)); COMMIT; END LOOP; END $$",
	} {
		t.Run(name, func(t *testing.T) {
			s := startAgain(t, cfg, pos)
			pgtest.Exec(t, dsn, sql)
			ended := make(chan error, 1)
			go func() {
				ticker := time.NewTicker(150 * time.Millisecond) // too often to look blocked
				defer ticker.Stop()
				for range s.Batches() {
					<-ticker.C
				}
				ended <- s.Err()
			}()
			stop(t, srv, pgtest.Fast)
			if err := await(t, ended); !errors.Is(err, ErrServerStopping) {
				t.Errorf("the stream ended with %v, want %v", err, ErrServerStopping)
			}
		})
		restart(t, srv)
	}
}

func restart(t *testing.T, srv *pgtest.Server) {
	t.Helper()
	if err := srv.Start(); err != nil {
		t.Fatal(err)
	}
}

func confirmedAfterRestart(t *testing.T, srv *pgtest.Server, cfg Config) any {
	t.Helper()
	restart(t, srv)
	return confirmedFlush(t, cfg)
}

func TestStreamEndsWithItsServer(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	dsn := srv.DSN("postgres")
	cfg := configure(t, dsn)
	cfg.Slot = "cdcpub"
	c := connect(t, cfg)
	pos := create(t, c)
	c.Close()
	pgtest.Exec(t, dsn, backlog)
	for name, kill := range map[string]func(*testing.T) error{
		"immediate shutdown": func(*testing.T) error { _, err := srv.Stop(pgtest.Immediate); return err },
		"kill":               func(*testing.T) error { return srv.Kill() },
		"terminated walsender": func(t *testing.T) error {
			pgtest.Exec(t, dsn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
			return nil
		},
	} {
		for _, taken := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, batches are taken: %t", name, taken), func(t *testing.T) {
				s := startAgain(t, cfg, pos)
				var ended <-chan error
				if taken {
					for len(next(t, s).Events) == 0 { // until rows come
					}
					ended = drain(s, false)
				} else {
					awaitBlocked(t, dsn, cfg.Slot)
				}
				if err := kill(t); err != nil {
					t.Fatal(err)
				}
				if !taken {
					ended = drain(s, false)
				}
				if err := await(t, ended); err == nil {
					t.Error("the stream ended without an error")
				}
				if name != "terminated walsender" {
					restart(t, srv)
				}
			})
		}
	}
}

// status messages go out while nobody receives: without them the server would
// drop us after wal_sender_timeout, and broker outages last longer.
func TestBlockedStreamKeepsTalking(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	dsn := srv.DSN("postgres")
	cfg := configure(t, dsn)
	cfg.Slot = "cdcpub"
	s, pos := begin(t, cfg)
	pgtest.Exec(t, dsn, backlog)
	awaitBlocked(t, dsn, cfg.Slot)
	heard := func() string {
		return pgtest.Query[string](t, dsn, "SELECT coalesce(max(reply_time)::text, '') FROM pg_stat_replication")
	}
	for range 2 {
		before, since := heard(), time.Now()
		eventually(t, "the blocked stream has sent a status", func() bool { return heard() != before })
		took := time.Since(since)
		t.Logf("a status came after %s", took.Round(time.Millisecond))
		if took > statusInterval+time.Second {
			t.Errorf("a status came after %s, want one every %s", took, statusInterval)
		}
	}
	awaitBlocked(t, dsn, cfg.Slot)
	if got := confirmedFlush(t, cfg); got != pos.LSN {
		t.Errorf("the slot moved to %s, want %s", got, pos)
	}
	if n := len(ids(until(t, s, "20000"))); n != 20_000 {
		t.Errorf("%d events after the stream was blocked, want 20000", n)
	}
}

func TestNetworkFaults(t *testing.T) {
	t.Parallel()
	direct := pgtest.Database(t)
	u, err := url.Parse(direct)
	if err != nil {
		t.Fatal(err)
	}
	proxy := faultproxy.Start(t, u.Host)
	u.Host = proxy.Addr()
	cfg := configure(t, direct)
	cfg.DSN = u.String()
	s, pos := begin(t, cfg)

	proxy.Stall()
	pgtest.Exec(t, direct, "INSERT INTO outbox VALUES (1)")
	proxy.Resume()
	until(t, s, "1") // a stall loses nothing

	for name, fault := range map[string]func(){"cut": proxy.Cut, "reset": proxy.Reset} {
		fault()
		if err := end(t, s); err == nil {
			t.Errorf("after a %s the stream ended without an error", name)
		}
		s = startAgain(t, cfg, pos)
		until(t, s, "1")
	}

	proxy.Stall()
	begin := time.Now()
	s.Close()
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("Close took %s on a dead network", took)
	}
	if err := s.Err(); err != nil {
		t.Errorf("after Close: %v", err)
	}
	proxy.Resume()
}
