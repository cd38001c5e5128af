package wal

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cdcpub/cdcpub/offsets"
)

// Action is what a start does next.
type Action int

// The actions.
const (
	// ActionCreate makes the slot, publishes the rows older than it, then streams.
	ActionCreate Action = iota + 1
	// ActionSnapshot publishes the rows again under a fresh snapshot, then
	// streams: an earlier process died before its snapshot was complete.
	ActionSnapshot
	// ActionStream streams from Pos.
	ActionStream
)

// Plan is the outcome of a start-up decision.
type Plan struct {
	Action Action
	Pos    offsets.Position // where streaming begins; zero for ActionCreate
	Source offsets.Source
}

// Decide compares what was saved with what was found. The error is a *Refusal:
// whatever it does not know to be safe, it refuses.
func Decide(cfg Config, saved offsets.Checkpoint, f Findings) (Plan, error) {
	if saved.Phase == offsets.PhaseCreating && f.Slot == nil {
		// The slot was never made, so nothing can have been missed: whatever was
		// meant then, the configuration of today counts.
		saved = offsets.Checkpoint{}
	}
	if r := first(f.server()); r != nil {
		return Plan{}, r
	}
	if r := checkIdentity(saved, f); r != nil {
		return Plan{}, r
	}
	switch {
	case f.Slot == nil && saved.Phase != "":
		// Before the publication: that it is missing too must not hide the loss.
		return Plan{}, startOver(SlotLost, "replication slot %q does not exist, but position %s is saved: events after it are lost", cfg.Slot, saved.Pos)
	case f.Slot != nil && saved.Phase == "":
		// Before the publication: a service that comes second with the same names
		// must not be told to change the first one's.
		return Plan{}, foreignSlot(cfg, f)
	case saved.Phase != "":
		if r := checkBehindSlot(cfg, f); r != nil {
			return Plan{}, r
		}
	}
	if r := first(f.role(), f.slotsLeft(cfg), f.tables(cfg), f.publication(cfg), f.slotKind(cfg)); r != nil {
		return Plan{}, r
	}
	if r := checkOIDs(cfg, saved, f); r != nil {
		return Plan{}, r
	}
	return decidePosition(cfg, saved, f)
}

func decidePosition(cfg Config, saved offsets.Checkpoint, f Findings) (Plan, error) {
	plan := Plan{Source: f.Source}
	switch {
	case f.Slot == nil:
		plan.Action = ActionCreate
		return plan, nil
	case f.Slot.Active:
		return plan, refuse(SlotBusy, busyHint,
			"replication slot %q is in use by PostgreSQL process %d", cfg.Slot, f.Slot.ActivePID)
	case f.Slot.WALStatus == "lost" || f.Slot.Conflicting || f.Slot.InvalidationReason != "":
		return plan, startOver(SlotLost, "replication slot %q is invalidated (%s): events after %s are lost", cfg.Slot,
			strings.TrimSpace(f.Slot.WALStatus+" "+f.Slot.InvalidationReason), saved.Pos)
	case f.Slot.ConfirmedFlush == nil:
		return plan, startOver(SlotLost, "replication slot %q has no confirmed position", cfg.Slot)
	case saved.Phase == offsets.PhaseCreating:
		// The process died between creating the slot and saving its position.
		// Nothing was acknowledged yet, so the slot's own position is the beginning.
		plan.Action, plan.Pos = ActionSnapshot, offsets.Position{LSN: *f.Slot.ConfirmedFlush}
		return plan, nil
	case *f.Slot.ConfirmedFlush > saved.Pos.LSN:
		return plan, refuse(Gap, "find out who moved it before going on: the events in between were not published from here",
			"replication slot %q is confirmed up to %s, beyond the saved position %s: another consumer read from it, it was made anew, or the saved state is old",
			cfg.Slot, *f.Slot.ConfirmedFlush, saved.Pos)
	case saved.Pos.LSN > f.WALEnd:
		return plan, refuse(Gap, "streaming from here would skip new events: the server was restored to an earlier point",
			"the saved position %s lies beyond the end of the server's WAL, %s", saved.Pos, f.WALEnd)
	}
	plan.Pos = saved.Pos
	if saved.Source.Scope != f.Source.Scope {
		// Done counts other rows under another scope: read the transaction whole.
		plan.Pos = saved.Pos.Restart()
	}
	plan.Action = ActionStream
	if saved.Phase == offsets.PhaseSnapshot {
		plan.Action, plan.Pos = ActionSnapshot, saved.Pos.Restart()
	}
	return plan, nil
}

const (
	recoverHint = "to go on with what is still in the tables: cdcpub teardown, then cdcpub init and cdcpub run (every row is published again)"
	busyHint    = "stop the other one, or set source.slot to a name of this service's own"
)

// startOver refuses where nothing but a new beginning helps.
func startOver(cause Cause, format string, args ...any) *Refusal {
	r := refuse(cause, recoverHint, format, args...)
	r.Remedy = &Remedy{Commands: []string{"cdcpub teardown", "cdcpub init"}, Then: "cdcpub run publishes every row that is still in the tables again"}
	return r
}

// String says how far the slot is and who reads from it.
func (s *Slot) String() string {
	text := "confirmed up to no position"
	if s.ConfirmedFlush != nil {
		text = "confirmed up to " + s.ConfirmedFlush.String()
	}
	if s.Active {
		text += fmt.Sprintf(", in use by PostgreSQL process %d", s.ActivePID)
	}
	return text
}

func checkIdentity(saved offsets.Checkpoint, f Findings) *Refusal {
	if saved.Phase == "" {
		return nil
	}
	s, found := saved.Source, f.Source
	for _, d := range []struct{ what, saved, found string }{
		{"system identifier", s.SystemID, found.SystemID},
		{"database", s.Database, found.Database},
		{"slot", s.Slot, found.Slot},
		{"publication", s.Publication, found.Publication},
		{"timeline", fmt.Sprint(s.Timeline), fmt.Sprint(found.Timeline)},
	} {
		if d.saved != d.found {
			return refuse(Gap, "point source.dsn and offsets.path at what belongs together",
				"the saved position belongs to %s %s, the server has %s: positions cannot be compared", d.what, d.saved, d.found)
		}
	}
	return nil
}

// checkBehindSlot finds what was dropped although a slot still waits.
func checkBehindSlot(cfg Config, f Findings) *Refusal {
	for _, t := range f.Tables {
		if t.OID == 0 {
			return refuse(Gap, "give it its name back; if it is gone: "+recoverHint, "table %s of the saved position was renamed or dropped", t.Name)
		}
	}
	if f.Publication == nil {
		return startOver(Gap, "publication %q was dropped behind replication slot %q: rows may have passed unseen", cfg.Publication, cfg.Slot)
	}
	return nil
}

// checkOIDs notices a publication or table that was dropped and made again
// while a slot was waiting: rows inserted in between passed unseen.
func checkOIDs(cfg Config, saved offsets.Checkpoint, f Findings) *Refusal {
	if saved.Phase == "" {
		return nil
	}
	if saved.Source.PublicationOID != f.Source.PublicationOID {
		return startOver(Gap, "publication %q was made anew (OID %d, saved %d): rows may have passed unseen",
			cfg.Publication, f.Source.PublicationOID, saved.Source.PublicationOID)
	}
	if slices.Equal(saved.Source.Tables, f.Source.Tables) {
		return nil
	}
	return startOver(Gap, "the tables are not those of the saved position (saved %v, found %v): rows may have passed unseen",
		saved.Source.Tables, f.Source.Tables)
}
