package service

import (
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Kind says what a payload is to a consumer that missed earlier events.
type Kind string

// The kinds of this service's events.
const (
	Delta    Kind = "delta"    // a change, of no use without the state before it
	Snapshot Kind = "snapshot" // the whole state
)

// AggregateType is part of the exchange's name: outbox.event.order.
const AggregateType = "order"

// Event is one row of the outbox.
type Event struct {
	ID         pgtype.UUID
	OrderID    int64
	Version    int64 // the order's version after the event
	Type       string
	Kind       Kind
	OccurredAt time.Time // for people: it gives no order
	Payload    any       // stored as JSON
}

// newEvent makes the event before the transaction, not in it: however often that
// is tried, and even if nobody knows whether its COMMIT was done when the
// connection broke, the event has one ID. The table's primary key then keeps a
// second try from publishing it twice.
func newEvent(eventType string, kind Kind) Event {
	return Event{ID: newUUID(), Type: eventType, Kind: kind, OccurredAt: now()}
}

func (e *Event) insert(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version, kind, occurred_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		e.ID, AggregateType, strconv.FormatInt(e.OrderID, 10), e.Type, e.Payload, e.Version, e.Kind, e.OccurredAt)
	if err != nil {
		return fmt.Errorf("insert event: %w", err)
	}
	return nil
}

// newUUID returns a random UUID, version 4 of RFC 9562.
func newUUID() pgtype.UUID {
	id := pgtype.UUID{Valid: true}
	_, _ = rand.Read(id.Bytes[:]) // never fails: the program would end instead
	id.Bytes[6] = id.Bytes[6]&0x0f | 0x40
	id.Bytes[8] = id.Bytes[8]&0x3f | 0x80
	return id
}
