// Package consumer receives the order events and counts them. It shows delivery
// only.
//
// Delivery is at least once: after a crash of the connector or of the broker an
// event may come again, with the same message ID. Whoever changes a database on
// its account must remember the ID in the same transaction as the change, and
// must not apply version 4 of an order before version 3. Here the IDs are kept in
// memory, which forgets them with the process.
package consumer

import (
	"context"
	"errors"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	exchange = "outbox.event.order" // outbox.event. and the aggregate type
	queue    = "orders"
	// prefetch is how many messages may be on their way to us or in our hands. With
	// too few the consumer waits for the network, with no limit the whole queue
	// ends up in its memory.
	prefetch = 100
)

// Event is what this consumer looks at; docs/message-format.md has the rest.
type Event struct {
	ID      string // equal in two deliveries of one event
	OrderID string
	Version int64
	Type    string
	Origin  string // wal or snapshot: read from the log or from the table
	Payload []byte
	Again   bool // delivered to this process before
}

// Counts is what a consumer has received.
type Counts struct {
	Distinct   int // events
	Duplicates int // deliveries of events that had been delivered before
}

// Consumer has a connection to the broker and a queue there. One goroutine uses
// it; another may Close it.
type Consumer struct {
	conn   *amqp.Connection
	ch     *amqp.Channel
	seen   map[string]bool
	counts Counts
}

// Open connects and declares the exchange, the queue and the binding between
// them. Do that before the connector starts: an event that no queue takes is not
// lost, but it waits, and all later events of its order with it.
func Open(url string) (*Consumer, error) {
	conn, err := amqp.Dial(url)
	if err != nil {
		return nil, fmt.Errorf("connect to RabbitMQ: %w", err)
	}
	c := &Consumer{conn: conn, seen: map[string]bool{}}
	if err := c.declare(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Consumer) declare() error {
	var err error
	if c.ch, err = c.conn.Channel(); err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	if err := c.ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return fmt.Errorf("declare exchange %s: %w", exchange, err)
	}
	// A confirmed message is on the disks of a majority of a quorum queue's nodes.
	// In a classic queue it would be on one.
	args := amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum}
	if _, err := c.ch.QueueDeclare(queue, true, false, false, false, args); err != nil {
		return fmt.Errorf("declare queue %s: %w", queue, err)
	}
	// The routing key is the order's ID: all of them.
	if err := c.ch.QueueBind(queue, "#", exchange, false, nil); err != nil {
		return fmt.Errorf("bind queue %s: %w", queue, err)
	}
	if err := c.ch.Qos(prefetch, 0, false); err != nil {
		return fmt.Errorf("set prefetch: %w", err)
	}
	return nil
}

// Run calls handle for each delivery, one after another, and acknowledges it
// when handle returns nil. It ends with nil when ctx does, and with an error
// when handle fails or the channel closes; what was not acknowledged the broker
// delivers again, to the next consumer.
func (c *Consumer) Run(ctx context.Context, handle func(Event) error) error {
	closed := c.ch.NotifyClose(make(chan *amqp.Error, 1))
	deliveries, err := c.ch.ConsumeWithContext(ctx, queue, "", false, false, false, false, nil)
	if err != nil {
		return fmt.Errorf("consume %s: %w", queue, err)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case d, open := <-deliveries:
			if ctx.Err() != nil {
				return nil // which also closes deliveries
			}
			if !open {
				return fmt.Errorf("consume %s: %w", queue, reason(closed))
			}
			if err := handle(c.receive(d)); err != nil {
				return fmt.Errorf("handle event %s: %w", d.MessageId, err)
			}
			// Only now: acknowledged before it is dealt with, an event would be lost in a
			// crash in between.
			if err := d.Ack(false); err != nil {
				return fmt.Errorf("acknowledge event %s: %w", d.MessageId, err)
			}
		}
	}
}

// reason says why the deliveries ended. An error of the channel was sent before;
// there is none if the queue was deleted or the connection closed by us.
func reason(closed <-chan *amqp.Error) error {
	select {
	case e := <-closed:
		if e != nil {
			return e
		}
	default:
	}
	return errors.New("the queue was deleted or the connection closed")
}

func (c *Consumer) receive(d amqp.Delivery) Event {
	again := c.seen[d.MessageId]
	if again {
		c.counts.Duplicates++
	} else {
		c.seen[d.MessageId] = true
		c.counts.Distinct++
	}
	e := Event{ID: d.MessageId, Type: d.Type, Payload: d.Body, Again: again}
	e.OrderID, _ = d.Headers["aggregate_id"].(string)
	e.Version, _ = d.Headers["aggregate_version"].(int64)
	e.Origin, _ = d.Headers["origin"].(string)
	return e
}

// Counts returns what has been received so far: for handle, and after Run.
func (c *Consumer) Counts() Counts {
	return c.counts
}

// Close ends the connection, and Run with it.
func (c *Consumer) Close() error {
	if err := c.conn.Close(); err != nil && !errors.Is(err, amqp.ErrClosed) {
		return fmt.Errorf("close connection to RabbitMQ: %w", err)
	}
	return nil
}
