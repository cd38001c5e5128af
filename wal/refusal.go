package wal

import (
	"fmt"
	"strings"

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
	About string // the part of the set-up; empty: how the saved position and the slot go together
	Text  string
	Hint  string
	// Remedy is Hint in a form that can be carried out as it stands; nil where
	// somebody has to decide.
	Remedy *Remedy
}

// What a refusal can be about. Tables, the publication and the slot have their
// name behind it, as in "table public.outbox".
const (
	AboutWALLevel    = "wal_level"
	AboutPrimary     = "primary"
	AboutSynchronous = "synchronous_standby_names"
	AboutRole        = "role"
	AboutSlotsLeft   = "max_replication_slots"
	AboutTable       = "table "
	AboutPublication = "publication "
	AboutSlot        = "slot "
)

// Remedy ends a refusal. It has SQL or Commands, or neither.
type Remedy struct {
	SQL      []string // statements to run in the connector's database
	Role     string   // as which database role
	Commands []string // shell commands
	Then     string   // what has to follow and no command can do
	Or       string   // another way
}

// String is the remedy in a sentence.
func (r *Remedy) String() string {
	var parts []string
	if len(r.SQL) > 0 {
		parts = append(parts, fmt.Sprintf("as role %s run: %s", r.Role, strings.Join(r.SQL, "; ")))
	}
	if len(r.Commands) > 0 {
		parts = append(parts, "run: "+strings.Join(r.Commands, " && "))
	}
	if r.Then != "" {
		parts = append(parts, r.Then)
	}
	text := strings.Join(parts, "; then ")
	if r.Or != "" {
		text += "; or " + r.Or
	}
	return text
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

// Mend makes the refusal of a setup that remedy can put right.
func Mend(about string, remedy Remedy, format string, args ...any) *Refusal {
	return &Refusal{Cause: Setup, About: about, Text: fmt.Sprintf(format, args...), Hint: remedy.String(), Remedy: &remedy}
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
