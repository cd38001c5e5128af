package wal

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
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
	if r := checkServer(f); r != nil {
		return Plan{}, r
	}
	if r := checkIdentity(saved, f); r != nil {
		return Plan{}, r
	}
	// Before the publication: that it is missing too must not hide the loss.
	if f.Slot == nil && saved.Phase != "" {
		return Plan{}, refuse(SlotLost, recoverHint, "replication slot %q does not exist, but position %s is saved: events after it are lost", cfg.Slot, saved.Pos)
	}
	if r := checkPublication(cfg, saved, f); r != nil {
		return Plan{}, r
	}
	if f.Slot != nil {
		if r := checkSlot(cfg, f); r != nil {
			return Plan{}, r
		}
	}
	return decidePosition(cfg, saved, f)
}

func decidePosition(cfg Config, saved offsets.Checkpoint, f Findings) (Plan, error) {
	plan := Plan{Source: f.Source}
	switch {
	case f.Slot == nil:
		plan.Action = ActionCreate
		return plan, nil
	case saved.Phase == "":
		return plan, refuse(Gap, "set source.slot to a name of its own, bring back the state directory, or drop the slot with cdcpub teardown --without-state",
			"replication slot %q exists (%s), but nothing is saved here: it may be another connector's", cfg.Slot, f.Slot)
	case f.Slot.Active:
		return plan, refuse(SlotBusy, busyHint,
			"replication slot %q is in use by PostgreSQL process %d", cfg.Slot, f.Slot.ActivePID)
	case f.Slot.WALStatus == "lost" || f.Slot.Conflicting || f.Slot.InvalidationReason != "":
		return plan, refuse(SlotLost, recoverHint, "replication slot %q is invalidated (%s): events after %s are lost", cfg.Slot,
			strings.TrimSpace(f.Slot.WALStatus+" "+f.Slot.InvalidationReason), saved.Pos)
	case f.Slot.ConfirmedFlush == nil:
		return plan, refuse(SlotLost, recoverHint, "replication slot %q has no confirmed position", cfg.Slot)
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

func checkServer(f Findings) *Refusal {
	switch {
	case f.WALLevel != "logical":
		return refuse(Setup, "run: ALTER SYSTEM SET wal_level = logical; then restart PostgreSQL", "wal_level is %q, logical decoding needs \"logical\"", f.WALLevel)
	case f.InRecovery:
		return refuse(Setup, "point source.dsn at the primary (several hosts with target_session_attrs=read-write find it)", "the server is a standby")
	case isSyncStandby(f.SyncStandbys, f.ApplicationName):
		return refuse(Setup, "name the real standbys in synchronous_standby_names",
			"synchronous_standby_names = '%s' makes this connector a synchronous standby: a dead broker would freeze the application's commits", f.SyncStandbys)
	}
	return nil
}

// isSyncStandby reports whether a walsender of that application name counts as
// a synchronous standby. "*" matches every name.
func isSyncStandby(names, application string) bool {
	tokens := strings.FieldsFunc(names, func(r rune) bool { return strings.ContainsRune(` ,()"`, r) })
	return slices.ContainsFunc(tokens, func(t string) bool { return t == "*" || strings.EqualFold(t, application) })
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

func checkPublication(cfg Config, saved offsets.Checkpoint, f Findings) *Refusal {
	for i, t := range f.Tables {
		if t.OID == 0 && saved.Phase != "" {
			return refuse(Gap, "give it its name back; if it is gone: "+recoverHint, "table %s of the saved position was renamed or dropped", t.Name)
		}
		if t.OID == 0 {
			return refuse(Setup, "run: cdcpub init --create-table", "table %s does not exist", t.Name)
		}
		if t.Persistence != "p" {
			return refuse(Setup, "make it an ordinary table", "table %s is unlogged or temporary and leaves no trace in the log", t.Name)
		}
		if _, err := outbox.Bind(t.Name, t.Columns, cfg.Tables[i].Columns); err != nil {
			return refuse(Setup, "", "%v", err)
		}
	}
	p := f.Publication
	switch {
	case p == nil && saved.Phase != "" && f.Slot != nil:
		return refuse(Gap, recoverHint, "publication %q was dropped behind replication slot %q: rows may have passed unseen", cfg.Publication, cfg.Slot)
	case p == nil:
		return refuse(Setup, "run: cdcpub init", "publication %q does not exist", cfg.Publication)
	case !p.Insert:
		return refuse(Setup, "run: ALTER PUBLICATION "+outbox.QuoteIdentifier(cfg.Publication)+" SET (publish = 'insert')", "publication %q does not publish inserts", cfg.Publication)
	}
	for _, t := range f.Tables {
		switch {
		case !t.Published && t.Kind == "p" && !p.ViaRoot:
			return refuse(Setup, "run: ALTER PUBLICATION "+outbox.QuoteIdentifier(cfg.Publication)+" SET (publish_via_partition_root = true)",
				"publication %q publishes the partitions of %s under their own names", cfg.Publication, t.Name)
		case !t.Published:
			return refuse(Setup, "set source.publication and source.slot to names of this service's own, or add the table to the publication before its slot exists",
				"publication %q serves %s, not %s", cfg.Publication, strings.Join(p.Tables, ", "), t.Name)
		case t.RowFilter, t.ColumnList:
			return refuse(Setup, "publish the table without them", "publication %q has a row filter or a column list on %s, which is not supported yet", cfg.Publication, t.Name)
		}
	}
	return checkOIDs(cfg, saved, f)
}

// checkOIDs notices a publication or table that was dropped and made again
// while a slot was waiting: rows inserted in between passed unseen.
func checkOIDs(cfg Config, saved offsets.Checkpoint, f Findings) *Refusal {
	if saved.Phase == "" {
		return nil
	}
	if saved.Source.PublicationOID != f.Source.PublicationOID {
		return refuse(Gap, recoverHint, "publication %q was made anew (OID %d, saved %d): rows may have passed unseen",
			cfg.Publication, f.Source.PublicationOID, saved.Source.PublicationOID)
	}
	if slices.Equal(saved.Source.Tables, f.Source.Tables) {
		return nil
	}
	return refuse(Gap, recoverHint, "the tables are not those of the saved position (saved %v, found %v): rows may have passed unseen",
		saved.Source.Tables, f.Source.Tables)
}

func checkSlot(cfg Config, f Findings) *Refusal {
	s := f.Slot
	hint := "set source.slot to a name that is not taken"
	switch {
	case s.Type != "logical":
		return refuse(Setup, hint, "replication slot %q is a %s slot", cfg.Slot, s.Type)
	case s.Plugin != "pgoutput":
		return refuse(Setup, hint, "replication slot %q belongs to plugin %q, not pgoutput", cfg.Slot, s.Plugin)
	case s.Database != f.Source.Database:
		return refuse(Setup, hint, "replication slot %q belongs to database %q, not %q", cfg.Slot, s.Database, f.Source.Database)
	case s.Temporary:
		return refuse(Setup, hint, "replication slot %q is temporary", cfg.Slot)
	case s.TwoPhase:
		return refuse(Setup, hint, "replication slot %q decodes prepared transactions (two_phase)", cfg.Slot)
	}
	return nil
}
