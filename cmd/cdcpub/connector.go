package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
	"github.com/cdcpub/cdcpub/publish"
	"github.com/cdcpub/cdcpub/relay"
	"github.com/cdcpub/cdcpub/router"
	"github.com/cdcpub/cdcpub/snapshot"
	"github.com/cdcpub/cdcpub/wal"
)

// startTimeout bounds the questions that a start asks, but not the creation of
// the slot, which waits for the application's transactions.
const startTimeout = 30 * time.Second

// connector is one wired pipeline, made anew by every attempt.
type connector struct {
	cfg               Config
	router            *router.Router
	log               hclog.Logger
	board             *board
	createPublication bool
}

// source is where an attempt reads from.
type source struct {
	conn     *wal.Conn
	stream   *wal.Stream
	snapshot *snapshot.Source // nil: nothing older to publish
	// estimated is the planner's idea of how many rows the snapshot has.
	estimated int64
}

func (s *source) close() {
	if s.snapshot != nil {
		s.snapshot.Close()
	}
	if s.stream != nil {
		s.stream.Close()
	}
	if s.conn != nil {
		s.conn.Close()
	}
}

// attempt starts from the durable state and runs until ctx is cancelled or
// something fails.
func (c *connector) attempt(ctx context.Context) error {
	c.board.enter(monitor.StateStarting)
	store, err := filestore.Open(c.cfg.Offsets.Path)
	if err != nil {
		return err
	}
	defer c.closing("state", store.Close)
	cp, err := store.Acquire(ctx)
	if err != nil {
		return err
	}
	src := &source{}
	defer src.close()
	cp, err = c.open(ctx, store, cp, src)
	if err != nil {
		return err
	}
	pub, err := publish.New(c.cfg.publishConfig(c.log.Named("publish")))
	if err != nil {
		return err
	}
	defer c.closing("publisher", func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		return pub.Close(ctx)
	})
	r, err := relay.New(c.cfg.relayConfig(c.log.Named("relay")), c.router, pub, store)
	if err != nil {
		return err
	}
	c.board.attach(r, pub, src)
	defer c.board.detach()
	err = c.relay(ctx, r, cp, src)
	var mismatch *wal.ResumeMismatchError
	if errors.As(err, &mismatch) {
		return c.forgetTransaction(ctx, store, mismatch)
	}
	return err
}

// relay runs r, and ends it when the stream ends: during a snapshot the relay does
// not look at the stream, whose slot is the lock that keeps others away.
func (c *connector) relay(ctx context.Context, r *relay.Relay, cp offsets.Checkpoint, src *source) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var watch sync.WaitGroup
	defer watch.Wait()
	watch.Go(func() {
		select {
		case <-src.stream.Done():
			cancel()
		case <-ctx.Done():
		}
	})
	err := r.Run(ctx, cp, c.stages(src)...)
	cancel()
	if err == nil {
		err = src.stream.Err()
	}
	return err
}

func (c *connector) stages(src *source) []relay.Stage {
	stages := []relay.Stage{{Source: src.stream, Phase: offsets.PhaseStreaming}}
	if src.snapshot != nil {
		stages = append([]relay.Stage{{Source: src.snapshot, Phase: offsets.PhaseSnapshot}}, stages...)
	}
	return stages
}

// closing runs a clean-up whose failure changes nothing any more.
func (c *connector) closing(what string, f func() error) {
	if err := f(); err != nil {
		c.log.Debug("closing was not clean", "what", what, "error", err)
	}
}

// open decides where to start and gets the sources going. What it returns is
// saved already, or is saved by the relay before its first publish.
func (c *connector) open(ctx context.Context, store *filestore.Store, cp offsets.Checkpoint, src *source) (offsets.Checkpoint, error) {
	cfg := c.cfg.walConfig()
	asking, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := wal.Connect(asking, cfg)
	if err != nil {
		return cp, err
	}
	src.conn = conn
	found, err := c.inspect(asking, conn, cp)
	if err != nil {
		return cp, err
	}
	plan, err := wal.Decide(cfg, cp, found)
	if err != nil {
		return cp, err
	}
	if rs := c.cfg.messageIDProblems(found); len(rs) > 0 {
		return cp, rs[0]
	}
	first := plan.Action == wal.ActionCreate
	old := first || plan.Action == wal.ActionSnapshot
	// Before the slot exists: one that waits for a grant keeps WAL.
	if rs := c.cfg.oldRowProblems(found); old && len(rs) > 0 {
		return cp, rs[0]
	}
	cp.Source = plan.Source
	exported := ""
	if first {
		c.board.enter(monitor.StateCreating)
		if cp, exported, err = c.create(ctx, store, conn, cp); err != nil {
			return cp, err
		}
	} else {
		cp.Pos = plan.Pos
	}
	cp.Phase = offsets.PhaseStreaming
	switch {
	case old && c.cfg.Snapshot.Mode == "initial":
		cp.Phase = offsets.PhaseSnapshot
		for _, t := range found.Tables {
			src.estimated += max(t.Rows, 0)
		}
		sc := c.cfg.snapshotConfig()
		sc.Server, sc.Exported, sc.Point = conn.Sibling(), exported, cp.Pos.LSN
		opening, cancel := context.WithTimeout(ctx, startTimeout)
		defer cancel()
		if src.snapshot, err = snapshot.Open(opening, sc); err != nil {
			return cp, err
		}
	case old:
		cp.Holes = append(cp.Holes, offsets.Hole{Kind: "snapshot-never", Below: cp.Pos.LSN, Reason: "snapshot.mode is never", Since: time.Now().UTC()})
	}
	// The running stream holds the slot: from here on nobody else can read it.
	starting, cancelStart := context.WithTimeout(ctx, startTimeout)
	defer cancelStart()
	if src.stream, err = conn.Start(starting, cp.Pos, cp.Source.Tables); err != nil {
		return cp, err
	}
	c.log.Info("reading from the slot", "slot", cfg.Slot, "position", cp.Pos.String(), "phase", string(cp.Phase))
	return cp, nil
}

// inspect asks the server, and makes the publication if that was wanted and
// nothing can have been missed.
func (c *connector) inspect(ctx context.Context, conn *wal.Conn, cp offsets.Checkpoint) (wal.Findings, error) {
	found, err := conn.Inspect(ctx)
	if err != nil || !c.createPublication || found.Publication != nil || found.Slot != nil || cp.Phase != "" {
		return found, err
	}
	if err := conn.CreatePublication(ctx); err != nil {
		return found, err
	}
	return conn.Inspect(ctx)
}

// create makes the slot. The intent is saved before, so that a slot found after
// a crash in between is known to be ours.
func (c *connector) create(ctx context.Context, store *filestore.Store, conn *wal.Conn, cp offsets.Checkpoint) (offsets.Checkpoint, string, error) {
	cp.Phase = offsets.PhaseCreating
	if err := store.Save(ctx, cp); err != nil {
		return cp, "", err
	}
	c.log.Info("creating the replication slot; this waits for running transactions", "slot", c.cfg.Source.Slot)
	slot, err := conn.CreateSlot(ctx)
	var refused *wal.Refusal
	if errors.As(err, &refused) {
		// The server has said that it made none: a slot of that name is somebody
		// else's, now and later.
		cp.Phase = ""
		if err := store.Save(ctx, cp); err != nil {
			return cp, "", err
		}
		return cp, "", refused
	}
	if err != nil {
		return cp, "", err
	}
	cp.Pos = offsets.Position{LSN: slot.ConsistentPoint}
	return cp, slot.Snapshot, nil
}

// forgetTransaction saves the position without its progress inside a
// transaction, so that the next attempt reads that transaction whole.
func (c *connector) forgetTransaction(ctx context.Context, store *filestore.Store, cause error) error {
	cp, err := filestore.Read(c.cfg.Offsets.Path) // the relay may have saved since the start
	if err != nil {
		return err
	}
	c.log.Warn("reading a transaction again from its beginning", "reason", cause)
	cp.Pos = cp.Pos.Restart()
	if err := store.Save(context.WithoutCancel(ctx), cp); err != nil {
		return err
	}
	return cause
}
