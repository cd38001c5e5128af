package relay

import (
	"iter"
	"math/rand/v2"
	"slices"
	"time"
)

// aggregate is the state of one aggregate that has events on their way.
type aggregate struct {
	key     string
	out     int     // events at the publisher
	queue   []*item // events held back, by seq
	waiting bool    // the head was returned or nacked
	probing bool    // the head is out alone, to see whether it is taken now
	probe   *item   // that head
	listed  bool    // in queues.released
	tries   int     // of the head
	retryAt time.Time
	reason  error
}

// queues hold back events so that each aggregate keeps its order. They know
// nothing of the publisher; the relay's loop owns them.
type queues struct {
	strict     bool
	aggregates map[string]*aggregate // with anything out or queued
	waiting    map[*aggregate]struct{}
	released   []*aggregate // have a queue that may be published
}

func newQueues(strict bool) queues {
	return queues{strict: strict, aggregates: map[string]*aggregate{}, waiting: map[*aggregate]struct{}{}}
}

// admit gives a new event to its aggregate and reports whether it may be
// published at once; otherwise it is queued.
func (q *queues) admit(it *item, key string) bool {
	a := q.aggregates[key]
	if a == nil {
		a = &aggregate{key: key}
		q.aggregates[key] = a
	}
	it.agg = a
	if a.waiting || len(a.queue) > 0 || q.strict && a.out > 0 {
		a.queue = append(a.queue, it)
		return false
	}
	return true
}

// next returns an event of a released queue to publish now, or nil.
func (q *queues) next() *item {
	for len(q.released) > 0 {
		a := q.released[0]
		blocked := a.waiting || len(a.queue) == 0 || q.strict && a.out > 0
		if !blocked {
			it := a.pop()
			if q.strict || len(a.queue) == 0 {
				q.unlist()
			}
			return it
		}
		q.unlist()
	}
	return nil
}

func (q *queues) unlist() {
	q.released[0].listed = false
	q.released = q.released[1:]
}

func (a *aggregate) pop() *item {
	it := a.queue[0]
	a.queue[0] = nil
	a.queue = a.queue[1:]
	return it
}

// confirmed takes note that it is done and reports whether that ended a wait of
// its aggregate.
func (q *queues) confirmed(it *item) (resumed bool) {
	a := it.agg
	if a.probing {
		delete(q.waiting, a)
		a.waiting, a.probing, a.probe, a.tries, a.reason = false, false, nil, 0, nil
		resumed = true
	}
	switch {
	case a.waiting:
	case len(a.queue) > 0:
		if !a.listed {
			a.listed = true
			q.released = append(q.released, a)
		}
	case a.out == 0:
		delete(q.aggregates, a.key)
	}
	return resumed
}

// failed puts an event that came back into its place in the queue and makes the
// aggregate wait. It returns how long until the next try at the earliest.
func (q *queues) failed(it *item, reason error, now time.Time) time.Duration {
	a := it.agg
	at, _ := slices.BinarySearchFunc(a.queue, it.seq, func(x *item, seq uint64) int {
		if x.seq < seq {
			return -1
		}
		return 1
	})
	a.queue = slices.Insert(a.queue, at, it)
	if !a.waiting || a.probing {
		// Events that were out beside the first one to fail come back too; they are
		// one failure, not several.
		a.tries++
		a.retryAt = now.Add(backoff(a.tries, retryMin, retryMax))
	}
	a.waiting, a.probing, a.probe, a.reason = true, false, nil, reason
	q.waiting[a] = struct{}{}
	return a.retryAt.Sub(now)
}

// head is the event that a waiting aggregate waits for.
func (a *aggregate) head() *item {
	if a.probe != nil {
		return a.probe
	}
	return a.queue[0]
}

// held counts the events that wait with a.
func (a *aggregate) held() int {
	if a.probe != nil {
		return len(a.queue) + 1
	}
	return len(a.queue)
}

// due yields the heads of waiting queues whose time has come; each is out alone
// then. While other events of an aggregate are still out it is not tried: they
// may come back and belong before it.
func (q *queues) due(now time.Time) iter.Seq[*item] {
	return func(yield func(*item) bool) {
		for a := range q.waiting {
			if a.probing || a.out > 0 || now.Before(a.retryAt) {
				continue
			}
			a.probing, a.probe = true, a.pop()
			if !yield(a.probe) {
				return
			}
		}
	}
}

// backoff is a random time up to low doubled with every try, at most high, and
// half of low on top: full jitter spreads thousands of aggregates that fail
// together.
func backoff(tries int, low, high time.Duration) time.Duration {
	limit := high
	if shift := tries - 1; shift < 30 && low<<shift < high {
		limit = low << shift
	}
	return low/2 + rand.N(limit)
}
