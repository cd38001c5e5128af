package publish

import (
	amqp "github.com/rabbitmq/amqp091-go"
)

// Cause is why a message has no way to a queue.
type Cause string

// The causes.
const (
	NoExchange Cause = "no_exchange" // the exchange does not exist
	NoQueue    Cause = "no_queue"    // no queue is bound for the routing key
	NoRight    Cause = "no_right"    // the user may not write to the exchange
)

// UnroutableError is the error of a returned message, for those who have to say
// what would help.
type UnroutableError struct {
	Cause      Cause
	Exchange   string
	RoutingKey string // empty where the exchange alone is at fault
	Err        error  // what the broker said; the text
}

// Error is the text of Err.
func (e *UnroutableError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *UnroutableError) Unwrap() error { return e.Err }

// unroutable gives err the cause that the broker's code stands for, if it is one.
func unroutable(code int, exchange, key string, err error) error {
	cause, ok := map[int]Cause{amqp.NotFound: NoExchange, amqp.AccessRefused: NoRight, amqp.NoRoute: NoQueue}[code]
	if !ok {
		return err
	}
	return &UnroutableError{Cause: cause, Exchange: exchange, RoutingKey: key, Err: err}
}
