package relay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
)

func TestWaiting(t *testing.T) {
	for name, f := range map[string]func(*testing.T){
		"a returned event waits, later ones of its aggregate behind it, others go on": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "b1")
			r.settle(router.Returned, "a1")
			r.batch("a2", "b2")
			r.wantSent("a1 b1 b2 ")
			r.settle(router.Confirmed, "b1", "b2")
			r.pass(time.Second)
			if n := strings.Count(r.pub.ids(), "a1"); n != 2 {
				t.Errorf("a1 was sent %d times, want once more: %s", n, r.pub.ids())
			}
			r.settle(router.Confirmed, "a1")
			r.settle(router.Confirmed, "a2")
			r.pass(2 * time.Second)
			r.wantSaved(at(r.lsn))
			r.stop()
		},
		"only the head is tried, until it is taken": func(t *testing.T) {
			r := start(t, nil)
			var open atomic.Bool
			r.pub.answer = func(sent) router.Kind {
				if open.Load() {
					return router.Confirmed
				}
				return router.Returned
			}
			r.batch("a1")
			r.batch("a2", "a3")
			r.pass(2 * time.Minute)
			if strings.Contains(r.pub.ids(), "a2") {
				t.Errorf("a2 was tried while a1 waits: %s", r.pub.ids())
			}
			open.Store(true)
			r.pass(time.Minute)
			if !strings.HasSuffix(r.pub.ids(), "a1 a2 a3 ") {
				t.Errorf("after the head: %s", r.pub.ids())
			}
			r.stop()
		},
		"events that were out beside a returned one come back into their places": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "a2", "a3")
			r.settle(router.Returned, "a3")
			r.settle(router.Returned, "a1")
			r.pass(time.Minute)
			r.wantSent("a1 a2 a3 ") // a2 is still out: it may belong before what is tried
			r.settle(router.Nacked, "a2")
			r.pass(time.Minute)
			r.settle(router.Confirmed, "a1")
			r.wantSent("a1 a2 a3 a1 a2 a3 ")
			r.stop()
		},
		"the wait grows to half a minute, not beyond": func(t *testing.T) {
			r := start(t, nil)
			r.pub.answer = func(sent) router.Kind { return router.Nacked }
			r.batch("a1")
			r.pass(10 * time.Minute)
			n := len(r.pub.sent)
			if n < 22 || n > 120 {
				t.Errorf("%d tries in ten minutes, want about 45", n)
			}
			for i := 1; i < n; i++ {
				if gap := r.pub.sent[i].at.Sub(r.pub.sent[i-1].at); gap > retryMax+retryMin+tick {
					t.Errorf("try %d came after %s", i, gap)
				}
			}
			r.stop()
		},
		"stats name what waits and why": func(t *testing.T) {
			r := start(t, nil)
			r.batch("a1", "a2")
			r.settle(router.Returned, "a1", "a2")
			r.pass(tick)
			s := r.relay.Stats()
			if len(s.Waiting) != 1 || s.Waiting[0].Event != "a1" || s.Waiting[0].Queued != 2 ||
				s.Waiting[0].AggregateID != "a" || s.Waiting[0].Reason != "returned by the test" {
				t.Errorf("waiting: %+v", s.Waiting)
			}
			r.stop()
		},
		"strict keeps one event of an aggregate out": func(t *testing.T) {
			r := start(t, func(c *Config) { c.Strict = true })
			r.batch("a1", "a2", "b1", "a3")
			r.wantSent("a1 b1 ")
			r.settle(router.Confirmed, "a1")
			r.wantSent("a1 b1 a2 ")
			r.batch("a4")
			r.settle(router.Nacked, "a2")
			r.pass(time.Second)
			r.wantSent("a1 b1 a2 a2 ")
			r.settle(router.Confirmed, "a2")
			r.settle(router.Confirmed, "a3")
			r.settle(router.Confirmed, "a4")
			r.wantSent("a1 b1 a2 a2 a3 a4 ")
			r.stop()
		},
	} {
		t.Run(name, bubble(f))
	}
}

func TestStopPolicies(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Config)
		kind   router.Kind
	}{
		"a refused event stops the run":                  {nil, router.Refused},
		"a returned event stops the run by policy":       {func(c *Config) { c.OnUnroutable = Stop }, router.Returned},
		"a nacked event stops the run by its own policy": {func(c *Config) { c.OnNack = Stop }, router.Nacked},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			r := start(t, tc.change)
			b := r.tx("a1", "b1", "c1")
			r.send(b)
			r.settle(tc.kind, "b1")
			r.settle(router.Confirmed, "a1", "c1")
			err := <-r.result
			var stopped *StoppedError
			if !errors.As(err, &stopped) || stopped.Event != "b1" || stopped.Curable != (tc.kind != router.Refused) || stopped.Table != "public.outbox" || stopped.Position != b.Events[1].Position {
				t.Errorf("Run = %v", err)
			}
			// Everything before it is saved, so a second look repeats nothing.
			r.wantSaved(b.Events[0].Position)
			r.cancel()
		}))
	}
}

func TestEventThatCannotBeRoutedStopsTheRunBehindWhatIsBeforeIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, nil)
		b := r.tx("a1", "b1", "c1")
		b.Events[1].Malformed = errTest
		r.pub.answer = func(sent) router.Kind { return router.Confirmed }
		r.send(b)
		err := <-r.result
		var stopped *StoppedError
		if !errors.As(err, &stopped) || stopped.Event != "b1" || !errors.Is(err, errTest) {
			t.Errorf("Run = %v", err)
		}
		r.wantSent("a1 ")
		r.wantSaved(b.Events[0].Position)
		r.cancel()
	})
}

// Any order of outcomes: every event is confirmed exactly once in the end, the
// position never runs ahead, and strict never lets an aggregate's later event be
// accepted first.
func TestRandomOutcomes(t *testing.T) {
	for seed := range uint64(60) {
		for _, strict := range []bool{false, true} {
			t.Run(fmt.Sprintf("seed %d strict %t", seed, strict), bubble(func(t *testing.T) {
				randomOutcomes(t, rand.New(rand.NewPCG(seed, 7)), strict)
			}))
		}
	}
}

func randomOutcomes(t *testing.T, rng *rand.Rand, strict bool) {
	r := start(t, func(c *Config) { c.Strict = strict; c.Every = 1 + rng.IntN(20) })
	accepted := map[string]bool{}
	lastOf := map[string]int{}
	ends := map[offsets.LSN][]string{} // Through -> the events that must be accepted
	var all []string
	settleSome := func(n int) {
		ids := r.pub.unsettled()
		rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		for _, id := range ids[:min(n, len(ids))] {
			kind := router.Confirmed
			if x := rng.IntN(10); x == 0 {
				kind = router.Returned
			} else if x == 1 {
				kind = router.Nacked
			}
			if kind == router.Confirmed {
				var num int
				if _, err := fmt.Sscan(id[1:], &num); err != nil {
					t.Fatal(err)
				}
				if strict && num != lastOf[id[:1]]+1 {
					t.Fatalf("%s was accepted after %d", id, lastOf[id[:1]])
				}
				lastOf[id[:1]] = max(lastOf[id[:1]], num)
				accepted[id] = true
			}
			r.pub.settle(kind, id)
		}
		synctest.Wait()
		saved := r.store.last().Pos.LSN
		for through, ids := range ends {
			for _, id := range ids {
				if through <= saved && !accepted[id] {
					t.Fatalf("saved %s, but %s of %s is not accepted", saved, id, through)
				}
			}
		}
	}
	count := map[string]int{}
	for range 40 {
		var events []string
		for range rng.IntN(4) {
			agg := string(rune('a' + rng.IntN(5)))
			count[agg]++
			events = append(events, fmt.Sprintf("%s%d", agg, count[agg]))
		}
		b := r.tx(events...)
		all = append(all, events...)
		ends[b.Through.LSN] = all[:len(all):len(all)]
		for sent := false; !sent; {
			select {
			case r.src.batches <- b:
				sent = true
			case <-time.After(time.Second):
				settleSome(3)
			}
		}
		synctest.Wait()
		settleSome(rng.IntN(5))
	}
	for range 10_000 {
		if r.relay.Stats().Pending == 0 && len(r.pub.unsettled()) == 0 && r.store.last().Pos.LSN == r.lsn {
			break
		}
		settleSome(100)
		r.pass(time.Second)
	}
	if got := r.store.last().Pos.LSN; got != r.lsn || len(accepted) != len(all) {
		t.Errorf("in the end saved %s of %s, accepted %d of %d", got, r.lsn, len(accepted), len(all))
	}
	if len(r.relay.items) != 0 || len(r.relay.queues.aggregates) != 0 || r.relay.held != 0 {
		t.Errorf("left behind: %d items, %d aggregates, %d bytes", len(r.relay.items), len(r.relay.queues.aggregates), r.relay.held)
	}
	r.stop()
}

func TestOversizedEventGoesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, func(c *Config) { c.WindowBytes = outbox.MaxBatchBytes })
		b := r.tx("a1")
		b.Events[0].Payload = make([]byte, 4*outbox.MaxBatchBytes)
		r.send(b)
		r.wantSent("a1 ")
		r.refusesBatch()
		r.settle(router.Confirmed, "a1")
		r.batch("a2")
		r.stop()
	})
}
