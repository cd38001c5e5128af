package relay

import (
	"context"
	"sync"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
)

// lastSaveGrace is what Run allows for its last checkpoint when the confirms
// took all of ShutdownTimeout.
const lastSaveGrace = 2 * time.Second

// saver runs Save beside the loop: one at a time, and the next one with the
// newest position, whatever has piled up meanwhile.
type saver struct {
	store   Checkpoints
	jobs    chan offsets.Checkpoint
	results chan error
	cancel  context.CancelFunc
	worker  sync.WaitGroup

	// All below is owned by the goroutine of Run.

	saved    offsets.Checkpoint // durable
	events   uint64             // covered by saved
	savedAt  time.Time
	busy     bool
	sent     offsets.Checkpoint // what busy is about
	sentUpTo uint64
	// stalled: the last Save failed, or none has succeeded yet. Nothing is
	// published then: it could only be published again.
	stalled  bool
	failures int
	retryAt  time.Time
	urgent   offsets.LSN // a server waits for this much
}

func newSaver(store Checkpoints) *saver {
	return &saver{store: store, jobs: make(chan offsets.Checkpoint), results: make(chan error, 1)}
}

func (s *saver) start(ctx context.Context, cp offsets.Checkpoint) {
	s.saved, s.stalled = cp, true
	// The last checkpoint is saved after ctx is cancelled.
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	s.worker.Go(func() {
		for cp := range s.jobs {
			s.results <- s.save(run, cp)
		}
	})
}

func (s *saver) save(ctx context.Context, cp offsets.Checkpoint) error {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	return s.store.Save(ctx, cp)
}

func (s *saver) stop() {
	s.cancel()
	close(s.jobs)
	s.worker.Wait()
}

// save starts a checkpoint if one is due.
func (r *Relay) save() {
	s := r.saver
	now := time.Now()
	if s.busy || s.stalled && now.Before(s.retryAt) {
		return
	}
	cp, events := r.checkpoint()
	if !r.due(cp, events, now) {
		return
	}
	s.busy, s.sent, s.sentUpTo = true, cp, events
	s.jobs <- cp // the worker is idle, since not busy
}

// checkpoint is what could be saved now: nothing beyond Tracker.Safe, ever.
func (r *Relay) checkpoint() (offsets.Checkpoint, uint64) {
	cp, events := r.saver.saved, r.saver.events
	cp.Phase = r.phase
	if m, ok := r.tracker.Safe(); ok {
		cp.Pos, events = m.pos, m.events
	}
	return cp, events
}

func (r *Relay) due(cp offsets.Checkpoint, events uint64, now time.Time) bool {
	s := r.saver
	if s.stalled || cp.Phase != s.saved.Phase {
		return true
	}
	if cp.Pos == s.saved.Pos {
		return false
	}
	if r.drained() {
		return true
	}
	if cp.Pos.LSN >= s.urgent && s.saved.Pos.LSN < s.urgent {
		return true
	}
	fresh, age := events-s.events, now.Sub(s.savedAt)
	if fresh > 0 {
		return fresh >= uint64(r.cfg.Every) || age >= r.cfg.Interval
	}
	return age >= idleInterval && cp.Pos.LSN-s.saved.Pos.LSN > idleBytes
}

// synced reports whether everything that could be saved is saved.
func (r *Relay) synced() bool {
	cp, _ := r.checkpoint()
	s := r.saver
	return !s.busy && !s.stalled && cp.Phase == s.saved.Phase && cp.Pos == s.saved.Pos
}

// saved takes the result of a Save, and is the one place that acknowledges.
func (r *Relay) saved(err error) {
	s, now := r.saver, time.Now()
	s.busy = false
	if err != nil {
		s.stalled = true
		s.failures++
		r.count.saveFailures++
		wait := backoff(s.failures, saveMin, saveMax)
		s.retryAt = now.Add(wait)
		r.log.Error("checkpoint cannot be written, publishing is stopped", "error", err, "retry_in", wait.Round(time.Millisecond))
		return
	}
	if s.failures > 0 {
		r.log.Info("checkpoint is written again, publishing goes on", "failures", s.failures)
	}
	s.saved, s.events, s.savedAt = s.sent, s.sentUpTo, now
	s.stalled, s.failures = false, 0
	r.count.saves++
	r.src.Ack(s.saved.Pos.LSN)
}
