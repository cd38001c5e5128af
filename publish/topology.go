package publish

import (
	"errors"
	"fmt"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// ErrNoHashExchange is returned where the broker lacks the plugin
// rabbitmq_consistent_hash_exchange. The connection is lost with it.
var ErrNoHashExchange = errors.New("the broker has no consistent-hash exchanges: enable its plugin with: rabbitmq-plugins enable rabbitmq_consistent_hash_exchange")

// Queue is a durable queue to be made.
type Queue struct {
	Name string
	// SingleActiveConsumer has the broker give messages to one consumer at a time,
	// and to the next one when that is gone: order survives a fail-over.
	SingleActiveConsumer bool
}

// Made says whether something was made or was there before.
type Made bool

// DeclareExchange makes a durable exchange of the given kind if there is none of
// that name. One that exists is left as it is, whatever its kind.
func (b *Broker) DeclareExchange(name, kind string) (Made, error) {
	a, err := b.ExchangeExists(name)
	if err != nil || a == Yes {
		return false, err
	}
	a, err = b.answer(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(name, kind, true, false, false, false, nil)
	})
	var e *amqp.Error
	switch {
	// 503 on RabbitMQ 3.10, 406 on newer ones.
	case errors.As(err, &e) && kind == HashExchange && (e.Code == amqp.CommandInvalid || strings.Contains(e.Reason, "unknown exchange type")):
		return false, ErrNoHashExchange
	case err != nil:
		return false, fmt.Errorf("declare exchange %q: %w", name, err)
	case a != Yes:
		return false, &ForbiddenError{What: fmt.Sprintf("declare exchange %q", name)}
	}
	return true, nil
}

// ExchangeIs reports whether an exchange that exists is a durable one of the given
// kind. AMQP has no question for that, but a declaration of what exists changes
// nothing, and what differs is an error. It takes the right to configure; without
// it the answer is yes.
func (b *Broker) ExchangeIs(name, kind string) (bool, error) {
	_, err := b.answer(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(name, kind, true, false, false, false, nil)
	})
	if isCode(err, amqp.PreconditionFailed) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("ask for the kind of exchange %q: %w", name, err)
	}
	return true, nil
}

// HashExchange is the kind of exchange that spreads messages over its queues by a
// hash of their routing key.
const HashExchange = "x-consistent-hash"

// TopicExchange is the kind that cdcpub declares for events.
const TopicExchange = amqp.ExchangeTopic

// DeclareQueue makes a quorum queue without any limit: nothing that nobody has
// read may vanish. One that exists is used as it is.
func (b *Broker) DeclareQueue(q Queue) (Made, error) {
	a, err := b.answer(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(q.Name, true, false, false, false, nil)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("ask for queue %q: %w", q.Name, err)
	}
	if a == Yes {
		return false, nil
	}
	args := amqp.Table{"x-queue-type": "quorum"}
	if q.SingleActiveConsumer {
		args["x-single-active-consumer"] = true
	}
	a, err = b.answer(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(q.Name, true, false, false, false, args)
		return err
	})
	switch {
	case err != nil:
		return false, fmt.Errorf("declare queue %q: %w", q.Name, err)
	case a != Yes:
		return false, &ForbiddenError{What: fmt.Sprintf("declare queue %q", q.Name)}
	}
	return true, nil
}

// BindQueue binds a queue; a binding that exists stays the only one of its kind.
func (b *Broker) BindQueue(queue, exchange, key string) error {
	return b.bind(fmt.Sprintf("bind queue %q to exchange %q", queue, exchange), func(ch *amqp.Channel) error {
		return ch.QueueBind(queue, key, exchange, false, nil)
	})
}

// BindExchange has to get what from gets under key.
func (b *Broker) BindExchange(to, from, key string) error {
	return b.bind(fmt.Sprintf("bind exchange %q to exchange %q", to, from), func(ch *amqp.Channel) error {
		return ch.ExchangeBind(to, key, from, false, nil)
	})
}

func (b *Broker) bind(what string, request func(*amqp.Channel) error) error {
	a, err := b.answer(request)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	case a == Forbidden:
		return &ForbiddenError{What: what}
	case a == Missing:
		return fmt.Errorf("%s: one of them is gone", what)
	}
	return nil
}

// ForbiddenError is the broker's refusal of something that takes a right which
// the user lacks.
type ForbiddenError struct{ What string }

// Error names what was refused.
func (e *ForbiddenError) Error() string { return e.What + ": the user has no right to" }
