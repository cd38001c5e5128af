package relay

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
)

// maxWaiting bounds the list of waiting aggregates that Stats shows.
const maxWaiting = 20

type counters struct {
	read, retried                        uint64
	confirmed, returned, nacked, refused uint64
	saves, saveFailures                  uint64
}

// Waiting is an aggregate whose head event was returned or nacked.
type Waiting struct {
	AggregateType, AggregateID string
	Event                      string // ID of the head
	Position                   offsets.Position
	Reason                     string
	Err                        error // the same, for those who know the publisher's errors
	Attempts                   int
	Queued                     int // events that wait, the head included
	Since                      time.Time
}

// Stats is what the relay has done and holds. It is a copy.
type Stats struct {
	Phase                               offsets.Phase
	Read                                offsets.Position // of the last batch taken
	Sent                                offsets.Position // of the newest event given to the publisher
	Confirmed                           offsets.Position // everything up to it is confirmed
	Saved                               offsets.Position // and saved and acknowledged
	Events, Retried                     uint64
	Confirms, Returned, Nacked, Refused uint64
	Saves, SaveFailures                 uint64
	Pending, Span                       int
	HeldBytes                           int64
	WaitingAggregates                   int
	WaitingEvents                       int       // of them, their heads included
	Waiting                             []Waiting // the longest waiting first, at most 20
	// Oldest is when the oldest unfinished event was committed, or taken if that
	// is not known; zero if nothing is unfinished.
	Oldest time.Time
	// Stalled: the checkpoint cannot be written and nothing is published.
	Stalled bool
	// Full names the limit that keeps batches from being taken; empty if none.
	Full string
	At   time.Time // when this was true
}

// statsBoard lets other goroutines see the loop's counters without locks in it.
type statsBoard struct{ last atomic.Pointer[Stats] }

// Stats returns the state at the loop's last tick. It may be called from any
// goroutine.
func (r *Relay) Stats() Stats {
	if s := r.stats.last.Load(); s != nil {
		return *s
	}
	return Stats{}
}

func (r *Relay) publishStats() {
	c := r.count
	s := &Stats{
		Phase: r.phase, Read: r.read, Sent: r.sent, Saved: r.saver.saved.Pos,
		Events: c.read, Retried: c.retried,
		Confirms: c.confirmed, Returned: c.returned, Nacked: c.nacked, Refused: c.refused,
		Saves: c.saves, SaveFailures: c.saveFailures,
		Pending: r.tracker.Pending(), Span: r.tracker.Span(), HeldBytes: r.held,
		WaitingAggregates: len(r.queues.waiting), Waiting: r.waiting(), WaitingEvents: r.waitingEvents,
		Stalled: r.saver.stalled, Full: r.full(), At: time.Now(),
	}
	s.Confirmed = s.Saved // from before this process
	if m, ok := r.tracker.Safe(); ok {
		s.Confirmed = m.pos
	}
	if oldest, ok := r.items[r.nextSeq-uint64(s.Span)]; ok {
		s.Oldest = oldest.since
	}
	r.stats.last.Store(s)
}

func (r *Relay) full() string {
	switch {
	case r.spanFull():
		return "span"
	case r.heldFull():
		return "window_bytes"
	case r.out >= r.cfg.Window:
		return "window"
	default:
		return ""
	}
}

// waiting lists the aggregates that wait the longest. With tens of thousands of
// them that takes milliseconds, so it is done once a second.
func (r *Relay) waiting() []Waiting {
	if len(r.queues.waiting) == 0 {
		r.listed, r.listedAt, r.waitingEvents = nil, time.Time{}, 0
		return nil
	}
	now := time.Now()
	if now.Sub(r.listedAt) < time.Second {
		return r.listed
	}
	heads := make([]*aggregate, 0, maxWaiting+1)
	r.waitingEvents = 0
	for a := range r.queues.waiting {
		r.waitingEvents += a.held()
		at, _ := slices.BinarySearchFunc(heads, a, func(x, y *aggregate) int { return cmp.Compare(x.head().seq, y.head().seq) })
		if at < maxWaiting {
			heads = slices.Insert(heads, at, a)
			heads = heads[:min(len(heads), maxWaiting)]
		}
	}
	list := make([]Waiting, len(heads))
	for i, a := range heads {
		head := a.head()
		list[i] = Waiting{
			AggregateType: head.event.Aggregate.Type, AggregateID: head.event.Aggregate.ID, Event: head.event.ID,
			Position: head.event.Position, Reason: a.reason.Error(), Err: a.reason, Attempts: a.tries, Queued: a.held(), Since: head.since,
		}
	}
	r.listed, r.listedAt = list, now
	return list
}
