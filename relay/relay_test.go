package relay

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
)

func TestPositions(t *testing.T) {
	for name, f := range map[string]func(*testing.T){
		"a confirmed batch is saved within the interval, then acknowledged": func(t *testing.T) {
			r := start(t, nil)
			through := r.batch("a1", "b1")
			r.settle(router.Confirmed, "a1", "b1")
			r.wantSaved(at(startLSN))
			r.pass(time.Second + 2*tick)
			r.wantSaved(at(through))
			if got := r.src.acked(); got != through {
				t.Errorf("acknowledged %s, want %s", got, through)
			}
			r.stop()
		},
		"nothing is acknowledged beyond the oldest unconfirmed event": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "b1", "c1")
			r.batch("d1")
			r.settle(router.Confirmed, "b1", "c1", "d1")
			r.pass(time.Minute)
			r.wantSaved(at(startLSN))
			r.settle(router.Confirmed, "a1")
			r.pass(2 * time.Second)
			r.wantSaved(at(r.lsn))
			r.stop()
		},
		"a keepalive waits for the events before it": func(t *testing.T) {
			r := start(t, nil)
			through := r.batch("a1")
			r.send(outbox.Batch{Through: at(1 << 30), Urgent: true})
			r.pass(time.Minute)
			r.wantSaved(at(startLSN))
			r.settle(router.Confirmed, "a1")
			r.wantSaved(at(1 << 30))
			if through >= 1<<30 {
				t.Fatal("the test is wrong")
			}
			r.stop()
		},
		"progress inside a transaction is saved as such": func(t *testing.T) {
			r := start(t, nil)
			b := r.tx("a1", "b1", "c1")
			b.Through = b.Events[2].Position
			r.send(b)
			r.settle(router.Confirmed, "a1", "b1")
			r.pass(2 * time.Second)
			r.wantSaved(b.Events[1].Position)
			if got := r.src.acked(); got != startLSN {
				t.Errorf("acknowledged %s inside a transaction that began at %s", got, offsets.LSN(startLSN))
			}
			r.stop()
		},
		"many events are saved before the interval": func(t *testing.T) {
			r := start(t, func(c *Config) { c.Every = 3 })
			r.pass(10 * tick)
			before := r.store.count()
			r.batch("a1", "a2")
			r.settle(router.Confirmed, "a1", "a2")
			if r.store.count() != before {
				t.Error("saved before the third event")
			}
			through := r.batch("a3")
			r.settle(router.Confirmed, "a3")
			r.wantSaved(at(through))
			r.stop()
		},
		"progress without events is saved rarely and only when it is worth it": func(t *testing.T) {
			r := start(t, nil)
			r.send(outbox.Batch{Through: at(startLSN + idleBytes)})
			r.pass(time.Minute)
			r.wantSaved(at(startLSN))
			r.send(outbox.Batch{Through: at(startLSN + idleBytes + 1)})
			r.wantSaved(at(startLSN + idleBytes + 1))
			r.send(outbox.Batch{Through: at(startLSN + 10*idleBytes)})
			r.pass(idleInterval - time.Second)
			r.wantSaved(at(startLSN + idleBytes + 1))
			r.pass(2 * time.Second)
			r.wantSaved(at(startLSN + 10*idleBytes))
			r.stop()
		},
		"an urgent batch is saved at once": func(t *testing.T) {
			r := start(t, nil)
			r.send(outbox.Batch{Through: at(startLSN + 1), Urgent: true})
			r.wantSaved(at(startLSN + 1))
			r.stop()
		},
	} {
		t.Run(name, bubble(f))
	}
}

func TestLimits(t *testing.T) {
	for name, f := range map[string]func(*testing.T){
		"no more than the window is at the publisher": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9")
			r.wantSent("a1 a2 a3 a4 a5 a6 a7 a8 ")
			r.refusesBatch()
			r.settle(router.Confirmed, "a1")
			r.wantSent("a1 a2 a3 a4 a5 a6 a7 a8 a9 ")
			r.stop()
		},
		"no batch is taken beyond the bytes": func(t *testing.T) {
			r := start(t, func(c *Config) { c.WindowBytes = outbox.MaxBatchBytes })
			b := r.tx("a1")
			r.send(b)
			r.refusesBatch()
			r.settle(router.Confirmed, "a1")
			r.batch("a2")
			r.stop()
		},
		"no batch is taken beyond the span while one aggregate waits": func(t *testing.T) {
			r := start(t, func(c *Config) { c.Span = outbox.MaxBatchEvents })
			r.pub.answer = func(s sent) router.Kind {
				if s.key == "a" {
					return router.Returned
				}
				return router.Confirmed
			}
			r.batch("a1", "b1")
			r.refusesBatch()
			if s := r.relay.Stats(); s.Full != "span" || s.WaitingAggregates != 1 || s.Span != 2 || s.Pending != 1 {
				t.Errorf("stats do not show the full span: %+v", s)
			}
			r.stop()
		},
	} {
		t.Run(name, bubble(f))
	}
}

func TestSaving(t *testing.T) {
	for name, f := range map[string]func(*testing.T){
		"nothing is published before the first checkpoint": func(t *testing.T) {
			store := &fakeStore{fail: errTest}
			r := &rig{t: t, store: store, result: make(chan error, 1), lsn: startLSN,
				src: &fakeSource{batches: make(chan outbox.Batch), store: store, t: t},
				pub: &fakePublisher{outcomes: make(chan []router.Outcome, 100), unsettle: map[string]uint64{}}}
			r.run(nil, Stage{r.src, offsets.PhaseStreaming})
			r.refusesBatch()
			store.failWith(nil)
			r.batch("a1")
			r.wantSent("a1 ")
			r.stop()
		},
		"a checkpoint that cannot be written stops publishing until it can": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "a2")
			r.store.failWith(errTest)
			r.settle(router.Confirmed, "a1")
			r.pass(2 * time.Second)
			if s := r.relay.Stats(); !s.Stalled || s.SaveFailures == 0 {
				t.Errorf("stats do not show the stall: %+v", s)
			}
			r.refusesBatch()
			r.settle(router.Confirmed, "a2")
			r.store.failWith(nil)
			r.pass(saveMax + time.Second)
			r.wantSaved(at(startLSN + 100))
			r.lsn = startLSN + 1000
			r.batch("a3")
			r.wantSent("a1 a2 a3 ")
			r.stop()
		},
		"a slow checkpoint does not stop publishing, and the newest position follows it": func(t *testing.T) {
			r := start(t, nil)
			disk := make(chan struct{})
			r.store.blockUntil(disk)
			r.batch("a1")
			r.settle(router.Confirmed, "a1")
			r.pass(2 * time.Second)
			r.batch("a2")
			r.batch("a3")
			r.wantSent("a1 a2 a3 ")
			r.settle(router.Confirmed, "a2", "a3")
			close(disk)
			r.pass(2 * time.Second)
			if n := r.store.count(); n != 3 {
				t.Errorf("%d checkpoints, want 3: the first, a1's, and one for a2 and a3", n)
			}
			r.wantSaved(at(r.lsn))
			r.stop()
		},
		"a crash repeats no more than the window and what is between two checkpoints": func(t *testing.T) {
			r := start(t, func(c *Config) { c.Every = 4 })
			r.pub.answer = func(sent) router.Kind { return router.Confirmed }
			disk := make(chan struct{})
			r.store.blockUntil(disk)
			var events []string
			for i := range 20 {
				events = append(events, fmt.Sprintf("a%d", i))
			}
			r.batch(events...)
			r.pass(time.Second)
			if n := len(r.pub.sent); n != 8+4 {
				t.Errorf("%d events are sent beyond the last checkpoint, want the window of 8 and 4 more", n)
			}
			close(disk)
			r.pass(time.Second)
			if n := len(r.pub.sent); n != 20 {
				t.Errorf("%d of 20 events are sent after the checkpoint", n)
			}
			r.stop()
		},
		"being fenced ends the run at once": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "b1")
			r.store.failWith(fmt.Errorf("save: %w", offsets.ErrFenced))
			r.settle(router.Confirmed, "a1")
			r.pass(2 * time.Second)
			select {
			case err := <-r.result:
				if !errors.Is(err, offsets.ErrFenced) {
					t.Errorf("Run = %v, want ErrFenced", err)
				}
			default:
				t.Error("Run goes on")
			}
			r.cancel()
		},
	} {
		t.Run(name, bubble(f))
	}
}

func TestEnds(t *testing.T) {
	for name, f := range map[string]func(*testing.T){
		"a stop publishes what was taken, waits for the confirms, saves and acknowledges": func(t *testing.T) {
			r := start(t, nil)
			through := r.batch("a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9")
			r.cancel()
			r.settle(router.Confirmed, "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8")
			r.settle(router.Confirmed, "a9")
			if err := <-r.result; err != nil {
				t.Errorf("Run = %v", err)
			}
			r.wantSaved(at(through))
			if got := r.src.acked(); got != through {
				t.Errorf("acknowledged %s, want %s", got, through)
			}
		},
		"a stop gives up at its deadline and saves what is confirmed": func(t *testing.T) {
			r := start(t, nil)
			b := r.tx("a1", "b1")
			r.send(b)
			r.settle(router.Confirmed, "a1")
			began := time.Now()
			if err := r.stop(); err != nil {
				t.Errorf("Run = %v", err)
			}
			if took := time.Since(began); took < 8*time.Second || took > 9*time.Second {
				t.Errorf("the stop took %s, want the timeout of 8s", took)
			}
			r.wantSaved(b.Events[0].Position)
		},
		"a stop does not wait for aggregates that wait": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "b1")
			r.settle(router.Confirmed, "b1")
			r.settle(router.Returned, "a1")
			began := time.Now()
			r.stop()
			if took := time.Since(began); took > time.Second {
				t.Errorf("the stop took %s", took)
			}
		},
		"a stop with a checkpoint that cannot be written ends": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1")
			r.store.failWith(errTest)
			r.settle(router.Confirmed, "a1")
			began := time.Now()
			r.stop()
			if took := time.Since(began); took > time.Second {
				t.Errorf("the stop took %s", took)
			}
		},
		"a source that fails ends the run with its error, after what is out": func(t *testing.T) {
			r := start(t, nil)
			through := r.batch("a1")
			r.src.err = errTest
			close(r.src.batches)
			synctest.Wait()
			r.settle(router.Confirmed, "a1")
			if err := <-r.result; !errors.Is(err, errTest) {
				t.Errorf("Run = %v, want the source's error", err)
			}
			r.wantSaved(at(through))
			r.cancel()
		},
		"the next stage begins when everything of the last is confirmed and saved": func(t *testing.T) {
			store := &fakeStore{}
			snap := &fakeSource{batches: make(chan outbox.Batch), store: store, t: t}
			wal := &fakeSource{batches: make(chan outbox.Batch), store: store, t: t}
			r := &rig{t: t, store: store, result: make(chan error, 1), lsn: startLSN, src: snap,
				pub: &fakePublisher{outcomes: make(chan []router.Outcome, 100), unsettle: map[string]uint64{}}}
			r.run(nil, Stage{snap, offsets.PhaseSnapshot}, Stage{wal, offsets.PhaseStreaming})
			var bound atomic.Bool
			r.pub.answer = func(s sent) router.Kind {
				if s.key == "b" && !bound.Load() {
					return router.Returned
				}
				return router.Confirmed
			}
			b := r.tx("a1", "b1")
			b.Through = at(startLSN)
			r.send(b)
			close(snap.batches)
			r.src = wal
			r.refusesBatch()
			if got := store.last().Phase; got != offsets.PhaseSnapshot {
				t.Errorf("phase %q is saved while a snapshot row waits", got)
			}
			bound.Store(true)
			r.pass(time.Minute)
			if got := store.last(); got.Phase != offsets.PhaseStreaming || got.Pos != at(startLSN) {
				t.Errorf("saved %q at %s, want streaming at the consistent point", got.Phase, got.Pos)
			}
			r.batch("b2")
			r.stop()
		},
	} {
		t.Run(name, bubble(f))
	}
}
