package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/monitor"
)

// scene is what the narrator sees for a while. From one to the next a scene keeps
// what it does not change.
type scene struct {
	until  float64 // seconds since the start
	change func(s *monitor.Status)
}

// tell plays scenes at the narrator's pace and returns its lines with the time at
// which each was said.
func tell(scenes ...scene) []string {
	var n narrator
	var out []string
	start := time.Unix(1000, 0)
	s := monitor.Status{State: monitor.StateStarting, Source: monitor.Source{Slot: "cdcpub", Tables: []string{"public.outbox"}}}
	at := 0.0
	for _, sc := range scenes {
		if sc.change != nil {
			sc.change(&s)
		}
		for ; at < sc.until; at += narrateEvery.Seconds() {
			for _, line := range n.lines(start.Add(time.Duration(at*float64(time.Second))), s) {
				out = append(out, fmt.Sprintf("%4.1f %s", at, line))
			}
		}
	}
	return out
}

func streaming(s *monitor.Status) { s.State, s.Publisher.Connected = monitor.StateStreaming, true }

func waits(queued int, cause, exchange, key string) monitor.Waiting {
	return monitor.Waiting{AggregateID: key, Queued: queued, Cause: cause, Exchange: exchange, RoutingKey: key, Reason: "what the broker said"}
}

// waitFor makes aggregates wait; more is events of others, which are not listed.
func waitFor(more int, list ...monitor.Waiting) func(*monitor.Status) {
	return func(s *monitor.Status) {
		streaming(s)
		s.Waiting, s.Relay.WaitingAggregates, s.Relay.WaitingEvents = list, len(list), more
		for _, w := range list {
			s.Relay.WaitingEvents += w.Queued
		}
		s.Relay.Pending = s.Relay.WaitingEvents
	}
}

func TestNarrator(t *testing.T) {
	const connected = " connected: reading slot cdcpub (public.outbox) and publishing"
	for name, tc := range map[string]struct {
		scenes []scene
		want   []string
	}{
		"an idle start": {
			[]scene{{1, nil}, {20, streaming}},
			[]string{" 1.0" + connected, " 1.0 waiting for events"}},
		"events that flow": {
			[]scene{{1, streaming}, {3, func(s *monitor.Status) { s.Counters.Confirmed = 1 }}, {13, func(s *monitor.Status) { s.Counters.Confirmed = 1200 }},
				{60, func(s *monitor.Status) { s.Counters.Confirmed = 1201 }}},
			[]string{" 0.0" + connected, " 0.0 waiting for events", " 1.0 published the first 1 event", "11.0 published 1,199 events (120/s), 1,200 since the start",
				"21.0 published 1 event (0/s), 1,201 since the start"}},
		"an exchange that is missing, until somebody makes it": {
			[]scene{{1, streaming}, {40, waitFor(0, waits(2, "no_exchange", "outbox.event.order", "1"), waits(1, "no_exchange", "outbox.event.order", "2"))},
				{42, func(s *monitor.Status) { waitFor(0)(s); s.Counters.Confirmed = 3 }}},
			[]string{" 0.0" + connected, " 0.0 waiting for events",
				" 1.5 3 events wait: exchange outbox.event.order is missing; run: cdcpub init --broker",
				"31.5 3 events wait: exchange outbox.event.order is missing; run: cdcpub init --broker",
				"40.0 events flow again", "40.0 published the first 3 events"}},
		"a queue that is missing for one key": {
			[]scene{{2, waitFor(0, waits(1, "no_queue", "x", "42"))}},
			[]string{" 0.0" + connected, " 0.5 1 event waits: no queue is bound to exchange x for routing key 42; run: cdcpub init --broker"}},
		"a queue that is missing for more keys than are listed": {
			[]scene{{2, waitFor(4000, waits(1, "no_queue", "x", "42"), waits(2, "no_queue", "x", "43"))}},
			[]string{" 0.0" + connected, " 0.5 4,003 events wait: no queue is bound to exchange x for routing keys such as 42; run: cdcpub init --broker"}},
		"several causes, those with the most events first": {
			[]scene{{2, waitFor(10, waits(1, "no_exchange", "a", "1"), waits(5, "no_right", "b", "1"), waits(3, "nacked", "", "1"), waits(2, "no_exchange", "d", "1"))}},
			[]string{" 0.0" + connected, " 0.5 5 events wait: the user may not write to exchange b; run: cdcpub check",
				" 0.5 3 events wait: what the broker said", " 0.5 2 events wait: exchange d is missing; run: cdcpub init --broker",
				" 0.5 11 events wait for other reasons; run: cdcpub status"}},
		"what heals at once is not worth a line": {
			[]scene{{1, streaming}, {1.5, waitFor(0, waits(1, "no_queue", "x", "42"))}, {5, waitFor(0)}},
			[]string{" 0.0" + connected, " 0.0 waiting for events"}},
		"a broker that is away": {
			[]scene{{2, func(s *monitor.Status) {
				s.State, s.Relay.Pending = monitor.StateStreaming, 7
				s.Publisher.LastError, s.Reason = "dial broker: connection refused", "not connected to the broker: dial broker: connection refused"
			}}, {4, func(s *monitor.Status) { streaming(s); s.Reason = "" }}},
			[]string{" 0.5 7 events wait: not connected to the broker: dial broker: connection refused", " 2.0" + connected, " 2.0 events flow again"}},
		"a refusal with its way out": {
			[]scene{{2, func(s *monitor.Status) {
				s.State, s.Refusal = monitor.StateRefused, &monitor.Refusal{Text: "publication does not exist", Hint: "run: cdcpub init"}
			}}, {4, func(s *monitor.Status) { s.Refusal = nil; streaming(s) }}},
			[]string{" 0.5 nothing is published: publication does not exist; run: cdcpub init", " 2.0" + connected, " 2.0 events flow again", " 2.0 waiting for events"}},
		"a database that is away": {
			[]scene{{2, func(s *monitor.Status) { s.State, s.Reason = monitor.StateWaiting, "connect to PostgreSQL: refused" }}},
			[]string{" 0.5 nothing is read: connect to PostgreSQL: refused"}},
		"old rows, with an idea of how many": {
			[]scene{{2, func(s *monitor.Status) {
				s.State, s.Publisher.Connected, s.Snapshot = monitor.StateSnapshot, true, &monitor.Snapshot{Estimated: 50000}
			}}, {4, func(s *monitor.Status) { s.Snapshot.Rows, s.Counters.Confirmed = 6400, 6400 }}, {5, func(s *monitor.Status) { s.Snapshot.Rows, s.Counters.Confirmed = 60000, 60000 }},
				{9, func(s *monitor.Status) { s.Snapshot.Done = true; streaming(s) }}},
			[]string{" 0.0" + connected, " 2.0 old rows: 6,400 of about 50,000 published (12 %), 3,200/s, about 14s to go",
				" 4.0 old rows: 60,000 of about 50,000 published (99 %), 15,000/s", " 5.0 old rows: all 60,000 published in 5s"}},
		"old rows, without any idea": {
			[]scene{{2, func(s *monitor.Status) {
				s.State, s.Publisher.Connected, s.Snapshot = monitor.StateSnapshot, true, &monitor.Snapshot{}
			}}, {3, func(s *monitor.Status) { s.Snapshot.Rows = 10 }}},
			[]string{" 0.0" + connected, " 2.0 old rows: 10 published, 5/s"}},
		"a stop is not the end of a trouble": {
			[]scene{{2, waitFor(0, waits(1, "no_exchange", "x", "1"))}, {4, func(s *monitor.Status) { s.State = monitor.StateStopping }}},
			[]string{" 0.0" + connected, " 0.5 1 event waits: exchange x is missing; run: cdcpub init --broker"}},
	} {
		t.Run(name, func(t *testing.T) {
			if d := cmp.Diff(tc.want, tell(tc.scenes...)); d != "" {
				t.Errorf("lines (-want +got):\n%s", d)
			}
		})
	}
}

func TestThousands(t *testing.T) {
	var got []string
	for _, n := range []uint64{0, 999, 1000, 123456, 1234567} {
		got = append(got, thousands(n))
	}
	if s := strings.Join(got, " "); s != "0 999 1,000 123,456 1,234,567" {
		t.Error(s)
	}
}
