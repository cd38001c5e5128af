package offsets

import (
	"errors"
	"time"
)

// ErrFenced is returned by a checkpoint store when another process has taken
// the connector's place. The holder of a fenced store must stop at once.
var ErrFenced = errors.New("another process holds this connector's state")

// Phase is what the connector was doing when the checkpoint was taken. The
// empty Phase means that nothing was ever saved.
type Phase string

// The phases, in the order in which a connector passes through them.
const (
	// PhaseCreating is saved before CREATE_REPLICATION_SLOT, so that a slot
	// found after a crash is known to be ours and never acknowledged.
	PhaseCreating Phase = "creating"
	// PhaseSnapshot lasts until every row older than the slot is confirmed.
	PhaseSnapshot Phase = "snapshot"
	// PhaseStreaming is everything after.
	PhaseStreaming Phase = "streaming"
)

// Table identifies one table of the publication. The OIDs tell a table or a
// publication entry that was dropped and made again from one that was always
// there: rows may have passed unseen in between.
type Table struct {
	Name           string `json:"name"` // schema.name
	OID            uint32 `json:"oid"`
	PublicationRel uint32 `json:"publication_rel,omitzero"` // pg_publication_rel.oid; zero for FOR ALL TABLES
}

// Source identifies what a checkpoint's positions belong to. An LSN means
// nothing on another server, timeline or slot.
type Source struct {
	SystemID       string  `json:"system_id"`
	Timeline       uint32  `json:"timeline"`
	Database       string  `json:"database"`
	Slot           string  `json:"slot"`
	Publication    string  `json:"publication"`
	PublicationOID uint32  `json:"publication_oid"`
	Tables         []Table `json:"tables"`
	// Scope is a hash of the configuration that decides which rows are events
	// and in which order they count. Position.Done is meaningless under another
	// scope.
	Scope string `json:"scope"`
}

// Hole is a set of rows that is never published on purpose.
type Hole struct {
	Kind   string    `json:"kind"` // "snapshot-never": rows older than the slot
	Below  LSN       `json:"below"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
}

// Checkpoint is the whole durable state of a connector. It is a value: slices
// in it are never changed after it was handed to a store.
type Checkpoint struct {
	Source Source `json:"source"`
	// Epoch counts the processes that have held this state. A store refuses an
	// older one (ErrFenced).
	Epoch uint64   `json:"epoch"`
	Phase Phase    `json:"phase"`
	Pos   Position `json:"pos"`
	Holes []Hole   `json:"holes,omitempty"`
}
