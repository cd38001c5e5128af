package wal

import (
	"fmt"

	"github.com/cdcpub/cdcpub/offsets"
)

// Cause sorts refusals by what an operator can do about them.
type Cause string

// The causes of a refusal.
const (
	// Setup: the server or the configuration is not as it must be.
	Setup Cause = "setup"
	// Gap: the saved position and the slot disagree; events may be lost.
	Gap Cause = "gap"
	// SlotLost: the slot is gone or its WAL is.
	SlotLost Cause = "slot-lost"
	// SlotBusy: another process reads from the slot. After a crash that is the
	// old walsender, for at most wal_sender_timeout.
	SlotBusy Cause = "slot-busy"
)

// Refusal is the error of a start that must not stream: going on would hide a
// loss. Text says what was found, Hint how to go on.
type Refusal struct {
	Cause Cause
	Text  string
	Hint  string
}

// Error joins what was found and the way out.
func (r *Refusal) Error() string {
	if r.Hint == "" {
		return r.Text
	}
	return r.Text + "; " + r.Hint
}

func refuse(cause Cause, hint, format string, args ...any) *Refusal {
	return &Refusal{Cause: cause, Text: fmt.Sprintf(format, args...), Hint: hint}
}

// ResumeMismatchError ends a stream that was to go on inside a transaction and
// found other rows than the saved position says. The whole transaction must be
// read again, from Position.Restart.
type ResumeMismatchError struct {
	Saved offsets.Position
	Found offsets.Row
	At    uint64 // ordinal of Found in the transaction
}

// Error names both rows.
func (e *ResumeMismatchError) Error() string {
	return fmt.Sprintf("resume inside transaction %s: event %d is %s %s, the saved position says %d events up to %s %s",
		e.Saved.Tx, e.At, e.Found.Table, e.Found.ID, e.Saved.Done, e.Saved.Last.Table, e.Saved.Last.ID)
}
