package relay

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

// Policy says what happens to an event that cannot be published now.
type Policy string

// The policies.
const (
	// Retry lets the aggregate wait and tries again, for ever.
	Retry Policy = "retry"
	// Stop ends Run with a *StoppedError.
	Stop Policy = "stop"
)

// The defaults of Config.
const (
	DefaultWindow          = 2048
	DefaultWindowBytes     = 32 << 20
	DefaultSpan            = 50_000
	DefaultInterval        = time.Second
	DefaultEvery           = 2000
	DefaultShutdownTimeout = 8 * time.Second
)

const (
	// Progress without events is saved rarely: a store in the source database
	// would make WAL with each checkpoint, which would be progress to save.
	idleInterval = 10 * time.Second
	idleBytes    = 64 << 10

	retryMin = 100 * time.Millisecond
	retryMax = 30 * time.Second
	saveMin  = 100 * time.Millisecond
	saveMax  = 5 * time.Second
	// saveTimeout bounds one Save, and with it the wait for the last one at an end.
	saveTimeout = 10 * time.Second
	// tick is how often the loop looks at what is due.
	tick = 50 * time.Millisecond
)

// Config limits and steers a Relay.
type Config struct {
	Window      int   // messages at the publisher
	WindowBytes int64 // bytes held anywhere; a single larger event is let through alone
	Span        int   // events from the oldest unfinished to the newest one
	// Strict keeps one message per aggregate at the publisher, so that not even a
	// nack or return lets a later event of the aggregate arrive first.
	Strict       bool
	OnUnroutable Policy
	OnNack       Policy
	Interval     time.Duration // between checkpoints, at most
	Every        int           // events between checkpoints, at most
	// ShutdownTimeout bounds the wait for confirms when Run ends.
	ShutdownTimeout time.Duration
	Logger          hclog.Logger
}

func (c Config) validate() error {
	switch {
	case c.Window < 1:
		return fmt.Errorf("window %d: want at least 1", c.Window)
	case c.Span < outbox.MaxBatchEvents || c.Span < c.Window:
		return fmt.Errorf("span %d: want at least the window, %d, and a batch, %d", c.Span, c.Window, outbox.MaxBatchEvents)
	case c.WindowBytes < outbox.MaxBatchBytes:
		return fmt.Errorf("window of %d bytes: want at least a batch, %d", c.WindowBytes, outbox.MaxBatchBytes)
	case c.Every < 1 || c.Interval <= 0:
		return errors.New("checkpoint interval and count must be above zero")
	case c.OnUnroutable != Retry && c.OnUnroutable != Stop, c.OnNack != Retry && c.OnNack != Stop:
		return fmt.Errorf("policies %q and %q: want %q or %q", c.OnUnroutable, c.OnNack, Retry, Stop)
	case c.Logger == nil:
		return errors.New("no logger")
	}
	return nil
}

// StoppedError ends Run because a policy says so. What came before the event is
// published and saved, but for what waits in other aggregates; up to a window of
// what came behind it is published, too.
type StoppedError struct {
	Event    string // ID
	Table    string
	Position offsets.Position
	Reason   error
	// Curable: the broker may take it another time. Otherwise the event itself is
	// at fault, and with the same configuration it will always be.
	Curable bool
}

// Error names the event and why it cannot be published.
func (e *StoppedError) Error() string {
	return fmt.Sprintf("event %s of table %s at %s cannot be published: %v", e.Event, e.Table, e.Position, e.Reason)
}

// Unwrap returns the reason.
func (e *StoppedError) Unwrap() error { return e.Reason }
