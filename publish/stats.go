package publish

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/cdcpub/cdcpub/router"
)

// Stats is a snapshot of what the publisher counts and holds. Counters start at
// zero with the Publisher and only rise.
type Stats struct {
	Connections int // that should be up, the control connection included
	Connected   int // that are
	Blocked     int // of those, how many the broker does not let publish

	Confirmed uint64
	Returned  uint64
	Nacked    uint64
	Refused   uint64

	ConnectionsLost uint64 // after they were established
	Resent          uint64 // messages to be sent again because a channel had died
	Isolations      uint64 // times a lane had to look for the message that ends its channel

	// ConfirmLatency is the time from handing a message to its channel, the last
	// one if there were several, to its confirm. It counts confirmed messages only.
	ConfirmLatency Latency

	Unsettled int // accepted and without an outcome
	InFlight  int // of those, handed to a channel
	// OldestUnsettled is the time since Publish of the oldest message without an
	// outcome, zero if there is none.
	OldestUnsettled time.Duration

	LastError   string // why a connection was last lost or not made; no secrets
	LastErrorAt time.Time
}

// counts are the counters behind Stats.
type counts struct {
	kinds      [router.Refused + 1]atomic.Uint64
	lost       atomic.Uint64
	resent     atomic.Uint64
	isolations atomic.Uint64
	latency    latency

	mu        sync.Mutex
	lastError string
	lastAt    time.Time
}

func (c *counts) settled(batch []router.Outcome) {
	for i := range batch {
		c.kinds[batch[i].Kind].Add(1)
	}
}

func (c *counts) failed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastError, c.lastAt = err.Error(), time.Now()
}

// Stats may be called from any goroutine.
func (p *Publisher) Stats() Stats {
	s := Stats{
		Connections:     len(p.links),
		Confirmed:       p.counts.kinds[router.Confirmed].Load(),
		Returned:        p.counts.kinds[router.Returned].Load(),
		Nacked:          p.counts.kinds[router.Nacked].Load(),
		Refused:         p.counts.kinds[router.Refused].Load(),
		ConnectionsLost: p.counts.lost.Load(),
		Resent:          p.counts.resent.Load(),
		Isolations:      p.counts.isolations.Load(),
		ConfirmLatency:  p.counts.latency.snapshot(),
	}
	for _, k := range p.links {
		if c := k.get(); c != nil {
			s.Connected++
			if c.blocked() != nil {
				s.Blocked++
			}
		}
	}
	for _, l := range p.lanes {
		unsettled, sent, oldest := l.load()
		s.Unsettled += unsettled
		s.InFlight += sent
		s.OldestUnsettled = max(s.OldestUnsettled, oldest)
	}
	p.counts.mu.Lock()
	defer p.counts.mu.Unlock()
	s.LastError, s.LastErrorAt = p.counts.lastError, p.counts.lastAt
	return s
}
