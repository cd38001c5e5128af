package outbox

import (
	"time"

	"github.com/cdcpub/cdcpub/offsets"
)

// Kind says what an event's payload is to a consumer that missed earlier ones.
type Kind string

// The kinds. KindUnstated is the zero value: the table has no such column or
// it is NULL.
const (
	KindUnstated  Kind = ""
	KindDelta     Kind = "delta"
	KindSnapshot  Kind = "snapshot"
	KindTombstone Kind = "tombstone"
)

// Origin says by which way an event came here.
type Origin string

// The origins.
const (
	OriginWAL      Origin = "wal"
	OriginSnapshot Origin = "snapshot"
)

// Aggregate is the business object that an event is about. Order is promised
// per aggregate.
type Aggregate struct {
	Tenant string
	Type   string
	ID     string
	// Version is the aggregate's version after the event; it counts only if
	// Versioned, since zero is a version that applications use.
	Version   int64
	Versioned bool
}

// Field is the value of a further column that the configuration asked for.
type Field struct {
	Name  string
	Value string // as PostgreSQL prints it
	Null  bool
}

// Event is one outbox row as the application wrote it. Values are text as
// PostgreSQL prints them. An event owns its bytes.
type Event struct {
	ID            string
	Aggregate     Aggregate
	Type          string
	SchemaVersion string // empty: not mapped or NULL
	Kind          Kind
	OccurredAt    time.Time // zero: not mapped or NULL
	CommittedAt   time.Time // zero: not known, as for snapshot rows
	Headers       []byte    // a JSON object as stored; nil: none
	Payload       []byte    // verbatim; a bytea column is decoded from hex
	ContentType   string    // from the payload column's type
	TraceParent   string
	TraceState    string
	Fields        []Field // further columns, in the order of the configuration
	Origin        Origin
	Table         string           // schema.name
	Position      offsets.Position // the position after this event

	// Malformed says why the row cannot be published as it stands, such as a
	// NULL aggregate ID. It travels with the event because what happens to it is
	// the relay's policy, not the reader's.
	Malformed error
}

// eventOverhead stands for the structs, string headers and queue entries that
// accompany an event through the pipeline.
const eventOverhead = 768

// Size is the number of bytes that holding e takes, for the limits on memory.
func (e *Event) Size() int {
	n := eventOverhead + len(e.ID) + len(e.Aggregate.Tenant) + len(e.Aggregate.Type) + len(e.Aggregate.ID) +
		len(e.Type) + len(e.SchemaVersion) + len(e.Headers) + len(e.Payload) + len(e.TraceParent) + len(e.TraceState)
	for i := range e.Fields {
		n += len(e.Fields[i].Name) + len(e.Fields[i].Value)
	}
	return n
}

// The largest batch that a source hands on, so that a receiver can reckon with
// it before it takes one. A single event above MaxBatchBytes travels alone.
const (
	MaxBatchEvents = 256
	MaxBatchBytes  = 1 << 20
)

// Batch is a run of events in commit order. Once all of them, and those of every
// batch before, are published, the position Through holds. A batch without
// events carries progress of the log alone; since it stands in the queue behind
// the rows it covers, it can never overtake an unconfirmed one.
type Batch struct {
	Events  []Event
	Through offsets.Position
	// Urgent asks for Through to be saved and acknowledged as soon as it holds:
	// the server is waiting for it, as at its shutdown.
	Urgent bool
}
