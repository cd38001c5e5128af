package monitor

import "time"

// State is what the connector as a whole is doing.
type State string

// The states. A connector goes through the first four in this order;
// StateWaiting and StateRefused can take the place of any of them, and
// StateStopping is the last.
const (
	StateStarting  State = "starting"  // checking the source against the saved position
	StateCreating  State = "creating"  // making the publication and the slot
	StateSnapshot  State = "snapshot"  // publishing rows older than the slot
	StateStreaming State = "streaming" // publishing what commits
	StateWaiting   State = "waiting"   // for a server, or for the slot
	StateRefused   State = "refused"   // for a person: see Refusal
	StateStopping  State = "stopping"  // asked to: draining confirms
)

// The names of the stages, in the order in which an event passes them.
const (
	StageRead      = "read"
	StagePublished = "published"
	StageConfirmed = "confirmed"
	StageSaved     = "saved"
	StageAcked     = "acked"
)

// Status is the connector at one moment, as /api/status prints it. Field names
// and values in JSON are an interface for others: they are added to, not changed.
type Status struct {
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	State     State     `json:"state"`
	// Ready means that it is streaming, connected to the broker and not blocked by
	// it, that checkpoints can be written, and that reading is not stopped because
	// waiting aggregates have used up relay.span or relay.window_bytes.
	Ready bool `json:"ready"`
	// Reason is one sentence that a person can act on. Empty if all is well.
	Reason  string   `json:"reason,omitempty"`
	Refusal *Refusal `json:"refusal,omitempty"`
	Source  Source   `json:"source"`
	// Stages are in the order in which an event passes them, so the first one
	// that stands still is where to look.
	Stages    []Stage   `json:"stages"`
	Relay     Relay     `json:"relay"`
	Publisher Publisher `json:"publisher"`
	// Snapshot is about the rows that are older than the slot; nil if this process
	// has not read any.
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	Counters Counters  `json:"counters"`
	// Waiting lists the longest waiting aggregates, 20 at most: enough to see what
	// they have in common. Relay.WaitingAggregates counts them all.
	Waiting []Waiting `json:"waiting,omitempty"`
	// ConfirmSeconds is the time from sending a message to its confirm; of one
	// sent again, from the last time. Nil before there was a publisher.
	ConfirmSeconds *Histogram `json:"confirm_seconds,omitempty"`
}

// Refusal is why the connector does not go on without a person.
type Refusal struct {
	Code string `json:"code"` // stable, for scripts
	Text string `json:"text"`
	Hint string `json:"hint"` // the command or setting that resolves it
}

// Position is a position in the write-ahead log. A zero LSN is an unknown one.
type Position struct {
	Text string `json:"text"` // "0/16B3748", or with progress inside a transaction
	LSN  uint64 `json:"lsn"`  // the same as bytes since the beginning of the log
}

// Source is the database side.
type Source struct {
	Slot        string   `json:"slot"`
	Publication string   `json:"publication"`
	Tables      []string `json:"tables"`
	// Received is the end of what has arrived of the server's log.
	Received Position `json:"received"`
}

// Stage is how far one stage has come.
type Stage struct {
	Name     string   `json:"name"`
	Position Position `json:"position"`
	// OldestUnfinished is the age in seconds of the oldest event that this stage
	// has taken and not finished; nil where that is not known, 0 where there is none.
	OldestUnfinished *float64 `json:"oldest_unfinished_seconds,omitempty"`
}

// Snapshot is how far the rows are that are older than the slot.
type Snapshot struct {
	Rows      uint64 `json:"rows"`                     // published and confirmed
	Estimated int64  `json:"estimated_rows,omitempty"` // in all, by the planner; 0 if it has no idea
	Done      bool   `json:"done"`
}

// Relay is what is under way, and the limits on it.
type Relay struct {
	Pending           int   `json:"pending"` // events read and not confirmed
	Span              int   `json:"span"`    // from the oldest of them to the newest event read
	HeldBytes         int64 `json:"held_bytes"`
	WaitingAggregates int   `json:"waiting_aggregates"`
	WaitingEvents     int   `json:"waiting_events"` // of these aggregates
	Window            int   `json:"window"`
	WindowBytes       int64 `json:"window_bytes"`
}

// Publisher is the broker side.
type Publisher struct {
	Connected  bool   `json:"connected"`
	Blocked    bool   `json:"blocked"` // by the broker's memory or disk alarm
	InFlight   int    `json:"in_flight"`
	Reconnects uint64 `json:"reconnects"`           // after connections that were lost
	LastError  string `json:"last_error,omitempty"` // without secrets
}

// Counters count since the process started.
type Counters struct {
	EventsRead uint64 `json:"events_read"`
	// One for each kind of outcome: a message that is retried counts each time.
	Confirmed uint64 `json:"confirmed"`
	Returned  uint64 `json:"returned"`
	Nacked    uint64 `json:"nacked"`
	Refused   uint64 `json:"refused"`
	Retried   uint64 `json:"retried"`
	// Resent messages had no outcome when their channel or connection was lost.
	Resent uint64 `json:"resent"`
	// Suppressed events arrived again after a restart inside a transaction and
	// were published before it.
	Suppressed uint64 `json:"suppressed"`
	// Ignored changes are no events: updates, deletes, truncates, and rows of
	// tables in the publication that are not configured.
	Ignored            uint64 `json:"ignored"`
	CheckpointSaves    uint64 `json:"checkpoint_saves"`
	CheckpointFailures uint64 `json:"checkpoint_failures"`
}

// Waiting is an aggregate whose events wait, and the event at its head.
type Waiting struct {
	AggregateType string    `json:"aggregate_type"`
	AggregateID   string    `json:"aggregate_id"`
	EventID       string    `json:"event_id"`
	Queued        int       `json:"queued"` // events that wait, that one included
	Cause         string    `json:"cause"`  // no_exchange, no_queue, no_right, or nacked
	Exchange      string    `json:"exchange,omitempty"`
	RoutingKey    string    `json:"routing_key,omitempty"`
	Reason        string    `json:"reason"`
	Attempts      int       `json:"attempts"`
	Since         time.Time `json:"since"`
}

// Histogram is a snapshot of a distribution with fixed buckets.
type Histogram struct {
	Bounds []float64 `json:"bounds"` // upper, inclusive, ascending
	Counts []uint64  `json:"counts"` // one for each bound, and one for what is above
	Sum    float64   `json:"sum"`
}
