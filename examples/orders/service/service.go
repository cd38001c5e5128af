// Package service is a small order service: it shows how an application writes
// its outbox. Copy apply, the one transaction in which the order and its event
// are written; the rest is only there to call it.
//
// Table outbox is the one that `cdcpub init --create-table` creates.
package service

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Limit is the highest amount of an order, in cents.
const Limit = 10_000

var (
	// ErrPaid refuses to change an order that is paid.
	ErrPaid = errors.New("the order is paid already")
	// ErrOverLimit refuses an order of more than Limit.
	ErrOverLimit = errors.New("the order would be over the limit")
	// ErrBusy reports an order that others kept changing: try again later.
	ErrBusy = errors.New("the order is changed by too many at once")

	// errLostUpdate is why a transaction is run again.
	errLostUpdate = errors.New("another transaction changed the order meanwhile")
)

// attempts bounds how often one change is tried. Of several that meet, one always
// gets through, so this is reached only where far too many change one order.
const attempts = 20

// Schema creates the service's own table.
const Schema = `CREATE TABLE IF NOT EXISTS orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	amount bigint NOT NULL,
	status text NOT NULL,
	-- Raised by one with each change. Neither a sequence nor a clock would do: both
	-- have gaps and give out values in another order than that of the commits.
	version bigint NOT NULL
)`

// DB is what a *pgx.Conn and a *pgxpool.Pool have in common.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Service places orders and changes them. Like its DB it may be used by several
// goroutines at once if that is a pool, and by one if it is a connection.
type Service struct {
	DB DB
}

// change is one step in an order's life. amount is added to what the order had.
type change struct {
	event  Event
	amount int64
	status string
}

// Place creates an order of the given amount in cents.
func (s *Service) Place(ctx context.Context, amount int64) (Event, error) {
	e := newEvent("OrderPlaced", Snapshot)
	err := pgx.BeginFunc(ctx, s.DB, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `INSERT INTO orders (amount, status, version) VALUES ($1, 'open', 1)
			RETURNING id, version`, amount).Scan(&e.OrderID, &e.Version)
		if err != nil {
			return fmt.Errorf("insert order: %w", err)
		}
		e.Payload = order{ID: e.OrderID, Amount: amount, Status: "open"}
		return e.insert(ctx, tx)
	})
	if err != nil {
		return e, fmt.Errorf("place order: %w", err)
	}
	return e, nil
}

// AddItem adds price, in cents, to an order. Its event says what was added.
func (s *Service) AddItem(ctx context.Context, orderID, price int64) (Event, error) {
	c := change{event: newEvent("ItemAdded", Delta), amount: price, status: "open"}
	c.event.OrderID = orderID
	c.event.Payload = itemAdded{ID: orderID, Price: price}
	return s.change(ctx, c)
}

// Pay closes an order. Its event carries the whole order, so that a consumer can
// go on from it without the earlier ones.
func (s *Service) Pay(ctx context.Context, orderID int64) (Event, error) {
	c := change{event: newEvent("OrderPaid", Snapshot), status: "paid"}
	c.event.OrderID = orderID
	return s.change(ctx, c)
}

// change runs the transaction, again if its update was lost. The event is the one
// that was tried, also where the error says that it was rolled back.
func (s *Service) change(ctx context.Context, c change) (Event, error) {
	for range attempts {
		err := pgx.BeginFunc(ctx, s.DB, func(tx pgx.Tx) error { return c.apply(ctx, tx) })
		if err == nil {
			return c.event, nil
		}
		if !errors.Is(err, errLostUpdate) {
			return c.event, fmt.Errorf("change order %d: %w", c.event.OrderID, err)
		}
	}
	return c.event, fmt.Errorf("change order %d: %w", c.event.OrderID, ErrBusy)
}

// apply writes the order and its event in one transaction: both are committed, or
// neither. There is no moment at which one of the two could be missing, which is
// what an outbox is for.
func (c *change) apply(ctx context.Context, tx pgx.Tx) error {
	var before order
	var version int64
	err := tx.QueryRow(ctx, `SELECT id, amount, status, version FROM orders WHERE id = $1`, c.event.OrderID).
		Scan(&before.ID, &before.Amount, &before.Status, &version)
	if err != nil {
		return fmt.Errorf("read order: %w", err)
	}
	if before.Status == "paid" {
		return ErrPaid
	}
	// The update waits for a transaction that has changed the row and not ended
	// yet. If that one commits, the version differs and no row is updated: what was
	// read above is out of date, so everything starts again from there.
	tag, err := tx.Exec(ctx, `UPDATE orders SET amount = amount + $1, status = $2, version = version + 1
		WHERE id = $3 AND version = $4`, c.amount, c.status, c.event.OrderID, version)
	if err != nil {
		return fmt.Errorf("update order: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return errLostUpdate
	}
	c.event.Version = version + 1
	after := order{ID: before.ID, Amount: before.Amount + c.amount, Status: c.status}
	if c.event.Kind == Snapshot {
		c.event.Payload = after
	}
	if err := c.event.insert(ctx, tx); err != nil {
		return err
	}
	// Better checked first. Here it shows that an event which is written already
	// goes with its transaction, and is never published.
	if after.Amount > Limit {
		return ErrOverLimit
	}
	return nil
}

// order is the payload of an event of kind snapshot: the whole state.
type order struct {
	ID     int64  `json:"order_id"`
	Amount int64  `json:"amount"`
	Status string `json:"status"`
}

// itemAdded is the payload of ItemAdded.
type itemAdded struct {
	ID    int64 `json:"order_id"`
	Price int64 `json:"price"`
}

// now has the precision of a timestamptz, so that what Event says is what the
// table holds.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }
