package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/publish"
	"github.com/cdcpub/cdcpub/relay"
	"github.com/cdcpub/cdcpub/wal"
)

// loopPatience is how long the relay's loop may be silent before the process is
// no longer live. The loop ticks every 50 ms and waits for nothing.
const loopPatience = time.Minute

// causeNacked is the cause of what waits and was not returned: a queue rejected it.
const causeNacked = "nacked"

// board gathers what the stages say of themselves into one status. The stages
// change with every attempt; the counters go on.
type board struct {
	cfg     Config
	started time.Time

	mu       sync.Mutex
	stopping bool
	state    monitor.State
	reason   string
	refusal  *monitor.Refusal
	relay    *relay.Relay // nil between attempts
	pub      *publish.Publisher
	stream   *wal.Stream
	snapshot *monitor.Snapshot // of the last attempt; nil if it had none
	rows     func() uint64     // that the snapshot has read
	last     relay.Stats       // of the last attempt, while there is no other
	// Of earlier attempts, so that no counter goes down with a new one.
	before   monitor.Counters
	confirms *monitor.Histogram // nil before the first
	lost     uint64             // connections to the broker
}

func newBoard(cfg Config) *board {
	return &board{cfg: cfg, started: time.Now().UTC(), state: monitor.StateStarting}
}

// enter begins a state. A refusal stays visible until the pipeline runs again.
func (b *board) enter(s monitor.State) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refusal == nil {
		b.state = s
	}
}

// stop shows that the process was asked to end.
func (b *board) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopping = true
}

// wait shows why an attempt failed.
func (b *board) wait(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.state, b.refusal, b.reason = monitor.StateWaiting, nil, err.Error()
}

// refuse shows a refusal and reports whether it is news.
func (b *board) refuse(r monitor.Refusal) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := b.refusal != nil && *b.refusal == r
	b.state, b.refusal, b.reason = monitor.StateRefused, &r, r.Text
	return !known
}

// attach shows the pipeline of an attempt.
func (b *board) attach(r *relay.Relay, pub *publish.Publisher, src *source) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.relay, b.pub, b.stream = r, pub, src.stream
	b.snapshot = nil
	if src.snapshot != nil {
		b.snapshot, b.rows = &monitor.Snapshot{Estimated: src.estimated}, src.snapshot.Rows
	}
	b.state, b.refusal, b.reason = monitor.StateStarting, nil, ""
}

// detach keeps the counters of the attempt that has ended.
func (b *board) detach() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = b.relay.Stats()
	b.follow(b.last)
	p := b.pub.Stats()
	b.before = b.counters(b.last, p)
	b.confirms = addLatency(b.confirms, p.ConfirmLatency)
	b.lost += p.ConnectionsLost
	b.relay, b.pub, b.stream = nil, nil, nil
}

// follow takes note of how far the snapshot is. The lock is held. Until it is over
// whatever is confirmed belongs to it; after that, everything it has read was.
func (b *board) follow(s relay.Stats) {
	switch {
	case b.snapshot == nil || b.snapshot.Done:
	case s.Phase == offsets.PhaseStreaming:
		b.snapshot.Rows, b.snapshot.Done = b.rows(), true
	default:
		b.snapshot.Rows = s.Confirms
	}
}

// counters adds an attempt's figures to those before it. The lock is held.
func (b *board) counters(s relay.Stats, p publish.Stats) monitor.Counters {
	c := b.before
	if b.relay == nil {
		return c
	}
	w := b.stream.Stats()
	c.EventsRead += s.Events
	c.Confirmed += s.Confirms
	c.Returned += s.Returned
	c.Nacked += s.Nacked
	c.Refused += s.Refused
	c.Retried += s.Retried
	c.Resent += p.Resent
	c.Suppressed += w.Skipped
	c.Ignored += w.Ignored
	c.CheckpointSaves += s.Saves
	c.CheckpointFailures += s.SaveFailures
	return c
}

// addLatency adds an attempt's confirm times to those before it. It owns l, whose
// buckets are always the same, and leaves before as it is.
func addLatency(before *monitor.Histogram, l publish.Latency) *monitor.Histogram {
	h := &monitor.Histogram{Bounds: l.Bounds, Counts: l.Counts, Sum: l.Sum}
	if before != nil {
		for i, n := range before.Counts {
			h.Counts[i] += n
		}
		h.Sum += before.Sum
	}
	return h
}

// live fails when the relay's loop stands still. Waiting for a server or for a
// person is not standing still.
func (b *board) live() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.relay == nil {
		return nil
	}
	if at := b.relay.Stats().At; !at.IsZero() && time.Since(at) > loopPatience {
		return fmt.Errorf("the relay's loop stands still since %s", at.UTC().Format(time.RFC3339))
	}
	return nil
}

func (b *board) status() monitor.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := monitor.Status{
		Version: version, StartedAt: b.started, State: b.state, Reason: b.reason, Refusal: b.refusal,
		Source: monitor.Source{Slot: b.cfg.Source.Slot, Publication: b.cfg.Source.Publication},
		Relay:  monitor.Relay{Window: b.cfg.Relay.Window, WindowBytes: int64(b.cfg.Relay.WindowBytes)},
	}
	for _, t := range b.cfg.Source.Tables {
		s.Source.Tables = append(s.Source.Tables, t.qualified())
	}
	r, p := b.last, publish.Stats{}
	s.Publisher.Reconnects, s.ConfirmSeconds = b.lost, b.confirms
	if b.relay != nil {
		r, p = b.relay.Stats(), b.pub.Stats()
		b.follow(r)
		s.ConfirmSeconds = addLatency(b.confirms, p.ConfirmLatency)
		s.Source.Received = position(offsets.Position{LSN: b.stream.Stats().Received})
		s.Publisher = monitor.Publisher{Connected: p.Connected == p.Connections, Blocked: p.Blocked > 0, InFlight: p.InFlight,
			Reconnects: b.lost + p.ConnectionsLost, LastError: p.LastError}
		s.Relay.Pending, s.Relay.Span, s.Relay.HeldBytes, s.Relay.WaitingAggregates = r.Pending, r.Span, r.HeldBytes, r.WaitingAggregates
		s.Relay.WaitingEvents = r.WaitingEvents
		s.State, s.Reason = stageState(r.Phase), runningReason(r, p)
		s.Ready = s.State == monitor.StateStreaming && s.Publisher.Connected && !s.Publisher.Blocked && !r.Stalled && !usedUp(r)
	}
	if b.snapshot != nil {
		snapshot := *b.snapshot
		s.Snapshot = &snapshot
	}
	s.Counters = b.counters(r, p)
	if b.stopping {
		s.State, s.Ready, s.Reason = monitor.StateStopping, false, "asked to stop: waiting for the confirms of what is under way"
	}
	s.Stages = stages(r)
	s.Waiting = waiting(r)
	return s
}

// stageState names what the relay reads; before its first tick it has no phase.
func stageState(p offsets.Phase) monitor.State {
	switch p {
	case offsets.PhaseSnapshot:
		return monitor.StateSnapshot
	case offsets.PhaseStreaming:
		return monitor.StateStreaming
	default:
		return monitor.StateStarting
	}
}

// runningReason is the one sentence about a running pipeline: the worst first.
func runningReason(r relay.Stats, p publish.Stats) string {
	switch {
	case r.Stalled && r.SaveFailures > 0:
		return "the checkpoint cannot be written: nothing is published until it can"
	case p.Connected < p.Connections && p.LastError != "":
		return "not connected to the broker: " + p.LastError
	case p.Connected < p.Connections:
		return "connecting to the broker"
	case p.Blocked > 0:
		return "the broker blocks publishing: it has a memory or disk alarm"
	case len(r.Waiting) > 0:
		w := r.Waiting[0]
		text := fmt.Sprintf("%d aggregates wait, the first is %s %s: %s", r.WaitingAggregates, w.AggregateType, w.AggregateID, w.Reason)
		if usedUp(r) {
			text += "; nothing new is read: relay." + r.Full + " is used up"
		}
		return text
	case r.Phase == offsets.PhaseSnapshot:
		return "publishing the rows that were there before the slot; what commits now follows after them"
	default:
		return ""
	}
}

// usedUp reports whether events that wait have filled a limit, so that nothing
// new is read until they move.
func usedUp(r relay.Stats) bool {
	return r.WaitingAggregates > 0 && (r.Full == "span" || r.Full == "window_bytes")
}

func stages(r relay.Stats) []monitor.Stage {
	age := 0.0
	if !r.Oldest.IsZero() {
		age = time.Since(r.Oldest).Seconds()
	}
	// Only events are published. What is confirmed beyond the newest of them held
	// none, and an idle outbox must not look like a publisher that stands still.
	published := r.Sent
	if r.Confirmed.LSN > published.LSN {
		published = r.Confirmed
	}
	return []monitor.Stage{
		{Name: monitor.StageRead, Position: position(r.Read)},
		{Name: monitor.StagePublished, Position: position(published)},
		{Name: monitor.StageConfirmed, Position: position(r.Confirmed), OldestUnfinished: &age},
		{Name: monitor.StageSaved, Position: position(r.Saved)},
		{Name: monitor.StageAcked, Position: position(r.Saved.Restart())},
	}
}

func position(p offsets.Position) monitor.Position {
	if p.IsZero() {
		return monitor.Position{}
	}
	return monitor.Position{Text: p.String(), LSN: uint64(p.LSN)}
}

func waiting(r relay.Stats) []monitor.Waiting {
	var list []monitor.Waiting
	for _, w := range r.Waiting {
		m := monitor.Waiting{AggregateType: w.AggregateType, AggregateID: w.AggregateID, EventID: w.Event,
			Queued: w.Queued, Cause: causeNacked, Reason: w.Reason, Attempts: w.Attempts, Since: w.Since}
		var e *publish.UnroutableError
		if errors.As(w.Err, &e) {
			m.Cause, m.Exchange, m.RoutingKey = string(e.Cause), e.Exchange, e.RoutingKey
		}
		list = append(list, m)
	}
	return list
}
