package publish

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/cdcpub/cdcpub/router"
)

const latencyBuckets = 14

// latencyBounds are the same in every Publisher, so that their counts add up.
// The last is the default of Config.ConfirmTimeout.
func latencyBounds() [latencyBuckets]time.Duration {
	const ms = time.Millisecond
	return [latencyBuckets]time.Duration{
		ms, 2500 * time.Microsecond, 5 * ms, 10 * ms, 25 * ms, 50 * ms, 100 * ms, 250 * ms, 500 * ms,
		time.Second, 2500 * ms, 5 * time.Second, 10 * time.Second, 60 * time.Second,
	}
}

// Latency is a distribution of times. It is a copy.
type Latency struct {
	Bounds []float64 // of the buckets in seconds: upper, inclusive, ascending
	Counts []uint64  // one for each bound, and one for what is above
	Sum    float64   // of all times, in seconds
}

// latency is what is counted behind Latency.
type latency struct {
	counts [latencyBuckets + 1]atomic.Uint64
	// micros is the sum. Messages in flight at once add their times: a window of
	// 2,048 would overflow a sum of nanoseconds in a hundred days.
	micros atomic.Uint64
}

// settled counts the confirmed messages of a batch, whose outcomes were known at
// now.
func (l *latency) settled(batch []*entry, outcomes []router.Outcome, now time.Time) {
	bounds := latencyBounds()
	var sum time.Duration
	for i := range outcomes {
		if outcomes[i].Kind != router.Confirmed {
			continue
		}
		took := now.Sub(batch[i].sentAt)
		bucket, _ := slices.BinarySearch(bounds[:], took)
		l.counts[bucket].Add(1)
		sum += took
	}
	l.micros.Add(uint64(sum.Microseconds()))
}

func (l *latency) snapshot() Latency {
	s := Latency{
		Bounds: make([]float64, latencyBuckets),
		Counts: make([]uint64, latencyBuckets+1),
		Sum:    float64(l.micros.Load()) / 1e6,
	}
	for i, bound := range latencyBounds() {
		s.Bounds[i] = bound.Seconds()
	}
	for i := range l.counts {
		s.Counts[i] = l.counts[i].Load()
	}
	return s
}
