package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
)

// Relay moves events from sources to a publisher and positions back. Make one
// with New and call Run once.
type Relay struct {
	cfg    Config
	router *router.Router
	pub    Publisher
	log    hclog.Logger
	stats  statsBoard

	// All below is owned by the goroutine of Run.

	src     Source
	phase   offsets.Phase // of the stage; the checkpoint follows
	closed  bool          // src has no more batches
	tracker offsets.Tracker[mark]
	items   map[uint64]*item // unsettled events by seq
	nextSeq uint64
	current []*item // taken, not yet submitted
	out     int     // at the publisher
	held    int64   // bytes of all items
	queues  queues
	saver   *saver
	count   counters

	listed   []Waiting // for Stats
	listedAt time.Time
	// waitingEvents was counted at listedAt.
	waitingEvents int

	read offsets.Position // Through of the last batch taken
	sent offsets.Position // of the newest event handed to the publisher

	end *ending // nil while going on
}

// mark is what the tracker returns once everything before it is done.
type mark struct {
	pos    offsets.Position
	events uint64 // added so far
}

// item is one event on its way.
type item struct {
	seq      uint64
	event    outbox.Event
	msg      router.Message
	invalid  error // why it has no msg
	size     int64
	agg      *aggregate
	attempts int
	since    time.Time // taken, or committed if that is known
}

// ending is why and until when Run winds up.
type ending struct {
	cause   error
	drainBy time.Time // no longer waiting for confirms
	leaveBy time.Time // nor for a last checkpoint
}

// New returns a relay that publishes by rt and pub and saves to store.
func New(cfg Config, rt *router.Router, pub Publisher, store Checkpoints) (*Relay, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("configure relay: %w", err)
	}
	return &Relay{
		cfg: cfg, router: rt, pub: pub, log: cfg.Logger,
		items: map[uint64]*item{}, queues: newQueues(cfg.Strict), saver: newSaver(store),
	}, nil
}

// Run works through the stages in order, beginning with the checkpoint cp, which
// it saves before the first publish. It returns nil when ctx is cancelled or the
// last stage has ended cleanly, else why it ended; in every case but
// offsets.ErrFenced the confirms that came in time are saved and acknowledged.
// It closes neither sources nor publisher.
func (r *Relay) Run(ctx context.Context, cp offsets.Checkpoint, stages ...Stage) error {
	r.saver.start(ctx, cp)
	defer r.saver.stop()
	for _, st := range stages {
		r.src, r.phase, r.closed = st.Source, st.Phase, false
		if err := r.stage(ctx); err != nil || r.end != nil {
			return err
		}
	}
	return nil
}

func (r *Relay) stage(ctx context.Context) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	stop := ctx.Done()
	for {
		r.submit()
		r.save()
		if r.finished() {
			r.publishStats()
			if r.end != nil {
				return r.end.cause
			}
			return nil
		}
		select {
		case b, ok := <-r.input():
			if ok {
				r.take(b)
			} else {
				r.sourceEnded()
			}
		case outcomes := <-r.pub.Outcomes():
			r.settle(outcomes)
		case err := <-r.saver.results:
			if errors.Is(err, offsets.ErrFenced) {
				r.saver.busy = false
				return err
			}
			r.saved(err)
		case now := <-ticker.C:
			r.probe(now)
			r.publishStats()
		case <-stop:
			stop = nil
			r.windUp(nil)
		}
	}
}

// finished reports whether the stage is over: everything drained and saved, or
// no longer waited for.
func (r *Relay) finished() bool {
	if r.end == nil {
		return r.drained() && r.synced()
	}
	now := time.Now()
	return r.drained() && (r.synced() || r.saver.stalled) || now.After(r.end.leaveBy)
}

// drained reports whether nothing is worth waiting for any more before the last
// checkpoint of the stage.
func (r *Relay) drained() bool {
	if r.end == nil {
		return r.closed && r.tracker.Pending() == 0
	}
	// What waits in queues waits for a person; it comes again after a restart.
	return r.out == 0 && (len(r.current) == 0 || r.saver.stalled) || time.Now().After(r.end.drainBy)
}

// windUp makes Run end with cause once the publisher has settled.
func (r *Relay) windUp(cause error) {
	if r.end != nil {
		return
	}
	by := time.Now().Add(r.cfg.ShutdownTimeout)
	r.end = &ending{cause: cause, drainBy: by, leaveBy: by.Add(lastSaveGrace)}
}

func (r *Relay) sourceEnded() {
	r.closed = true
	if err := r.src.Err(); err != nil {
		r.windUp(err)
	}
}

// stopAt ends Run because of one event. The events behind it are not
// submitted any more.
func (r *Relay) stopAt(it *item, reason error, curable bool) {
	r.current = nil
	r.windUp(&StoppedError{Event: it.event.ID, Table: it.event.Table, Position: it.event.Position, Reason: reason, Curable: curable})
}

// input is the source's channel while another batch fits, else nil. Before the
// stage's phase is saved nothing is taken: a crash would repeat the last stage.
func (r *Relay) input() <-chan outbox.Batch {
	if r.closed || r.end != nil || r.saver.stalled || r.saver.saved.Phase != r.phase ||
		len(r.current) > 0 || r.heldFull() || r.spanFull() {
		return nil
	}
	return r.src.Batches()
}

func (r *Relay) heldFull() bool {
	return r.held > 0 && r.held+outbox.MaxBatchBytes > r.cfg.WindowBytes
}

func (r *Relay) spanFull() bool {
	return r.tracker.Span()+outbox.MaxBatchEvents > r.cfg.Span
}

// take makes items of a batch. Every event gets a mark of its own: a stop in the
// middle of a batch then costs no duplicate.
func (r *Relay) take(b outbox.Batch) {
	now := time.Now()
	r.current = make([]*item, len(b.Events))
	for i := range b.Events {
		it := &item{event: b.Events[i], size: int64(b.Events[i].Size()), since: b.Events[i].CommittedAt}
		if it.since.IsZero() {
			it.since = now
		}
		it.msg, it.invalid = r.router.Route(&it.event)
		r.count.read++
		it.seq = r.tracker.Add(1, mark{pos: it.event.Position, events: r.count.read})
		r.nextSeq = it.seq + 1
		r.items[it.seq] = it
		r.held += it.size
		r.current[i] = it
	}
	if !b.Through.IsZero() {
		r.tracker.Add(0, mark{pos: b.Through, events: r.count.read})
		r.read = b.Through
	}
	if b.Urgent {
		r.saver.urgent = max(r.saver.urgent, b.Through.LSN)
	}
}

// submit hands over what the window has room for: first the queues that were
// released, then what was just taken.
func (r *Relay) submit() {
	if r.saver.stalled {
		return
	}
	if r.end == nil {
		for r.out < r.cfg.Window {
			it := r.queues.next()
			if it == nil {
				break
			}
			r.publish(it)
		}
	}
	for len(r.current) > 0 && r.out < r.cfg.Window && !r.ahead(r.current[0]) {
		it := r.current[0]
		r.current = r.current[1:]
		if it.invalid != nil {
			r.count.refused++
			r.stopAt(it, it.invalid, false)
			return
		}
		if r.queues.admit(it, it.msg.OrderKey) {
			r.sent = it.event.Position
			r.publish(it)
		}
	}
}

// ahead reports whether it lies so far beyond the last checkpoint that a crash
// would repeat more than a window and what may be confirmed between checkpoints:
// a slow disk then slows publishing. While an aggregate waits the checkpoint
// stands still by design, and Span is the limit.
func (r *Relay) ahead(it *item) bool {
	return it.seq >= r.saver.events+uint64(r.cfg.Window+r.cfg.Every) && len(r.queues.waiting) == 0
}

func (r *Relay) publish(it *item) {
	r.out++
	it.agg.out++
	it.attempts++
	if it.attempts > 1 {
		r.count.retried++
	}
	r.pub.Publish(it.seq, it.msg)
}

func (r *Relay) settle(outcomes []router.Outcome) {
	for _, o := range outcomes {
		it := r.items[o.Seq]
		r.out--
		it.agg.out--
		switch o.Kind {
		case router.Confirmed:
			r.confirmed(it)
		case router.Returned:
			r.count.returned++
			r.failed(it, o, r.cfg.OnUnroutable)
		case router.Nacked:
			r.count.nacked++
			r.failed(it, o, r.cfg.OnNack)
		default:
			r.count.refused++
			r.stopAt(it, o.Err, false)
		}
	}
}

func (r *Relay) confirmed(it *item) {
	r.count.confirmed++
	delete(r.items, it.seq)
	r.held -= it.size
	r.tracker.Done(it.seq)
	if r.queues.confirmed(it) {
		r.log.Info("aggregate goes on", "aggregate_type", it.event.Aggregate.Type, "aggregate_id", it.event.Aggregate.ID,
			"event", it.event.ID, "attempts", it.attempts, "queued", len(it.agg.queue))
	}
}

func (r *Relay) failed(it *item, o router.Outcome, policy Policy) {
	if policy == Stop {
		r.stopAt(it, o.Err, true)
		return
	}
	wait := r.queues.failed(it, o.Err, time.Now())
	level := hclog.Warn
	if it.attempts > 1 {
		level = hclog.Debug // known; thousands may wait, and the status shows them
	}
	r.log.Log(level, "event waits", "outcome", o.Kind.String(), "event", it.event.ID, "position", it.event.Position.String(),
		"aggregate_type", it.event.Aggregate.Type, "aggregate_id", it.event.Aggregate.ID,
		"attempts", it.attempts, "retry_in", wait.Round(time.Millisecond), "reason", o.Err)
}

// probe tries the heads of waiting queues whose time has come.
func (r *Relay) probe(now time.Time) {
	if r.end != nil || r.saver.stalled || r.out >= r.cfg.Window {
		return
	}
	for it := range r.queues.due(now) {
		r.publish(it)
		if r.out >= r.cfg.Window {
			return
		}
	}
}
