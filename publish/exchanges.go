package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// absentFor is how long a negative answer is believed. Messages to a missing
// exchange are retried by the caller, and its creation should not go unnoticed.
const absentFor = time.Second

// forbiddenFor is how long an exchange counts as forbidden after a message to it
// has ended channels with 403: the user may not write to it, or it is internal.
// No request asks for that right, only a message tries it, and each try stops
// its lane and costs it channels: once per second would be felt. Nor should it be
// long. A topic permission may forbid only some routing keys, and messages with
// the others are returned meanwhile.
const forbiddenFor = 5 * time.Second

// exchange is what is known of one exchange. Its fields are set before known is
// closed and never change; a new answer is a new exchange.
type exchange struct {
	known chan struct{}
	err   error     // why it cannot be published to; nil: it exists
	until time.Time // when err is forgotten, or tried
	// forbidden: err is the verdict on a message, and only a message can tell
	// whether it still holds.
	forbidden bool
}

// exchanges finds out which exchanges exist. A publish to a missing one would
// close the channel and with it everything in flight on it, so the first use of
// each is checked on a connection of its own. Lanes wait for answers to their
// own questions only.
type exchanges struct {
	link    *link
	declare bool

	mu      sync.Mutex
	byName  map[string]*exchange
	pending []string // to be checked, in order; all are in byName
	wake    chan struct{}
}

func newExchanges(control *link, declare bool) *exchanges {
	x := &exchanges{link: control, declare: declare, byName: make(map[string]*exchange), wake: make(chan struct{}, 1)}
	// Another connection may lead to another broker, or to the same one after
	// its operator has worked on it.
	control.onUp = x.forgetAll
	return x
}

// lookup returns what is known of name, or starts to find out. With trial, name
// was forbidden for forbiddenFor, and the caller's message is to be sent to see
// whether it still is; until it is known, all others get the old answer.
func (x *exchanges) lookup(name string) (e *exchange, trial bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e = x.byName[name]
	if e != nil && !e.stale() {
		return e, false
	}
	if e != nil && e.forbidden {
		return x.setForbidden(name, e.err), true
	}
	x.dropStale()
	e = &exchange{known: make(chan struct{})}
	x.byName[name] = e
	x.pending = append(x.pending, name)
	select {
	case x.wake <- struct{}{}:
	default:
	}
	return e, false
}

// forbid has messages to name returned without being sent, in all lanes, for
// forbiddenFor.
func (x *exchanges) forbid(name string, reason *amqp.Error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e := x.byName[name]; e != nil && !e.answered() {
		return // lanes wait for this check; if need be, the next message convicts again
	}
	err := fmt.Errorf("not sent: the broker has just closed the channel for a message to exchange %q: %w", name, reason)
	x.setForbidden(name, unroutable(reason.Code, name, "", err))
}

func (x *exchanges) setForbidden(name string, err error) *exchange {
	e := &exchange{known: make(chan struct{}), err: err, until: time.Now().Add(forbiddenFor), forbidden: true}
	close(e.known)
	x.byName[name] = e
	return e
}

func (e *exchange) answered() bool {
	select {
	case <-e.known:
		return true
	default:
		return false
	}
}

func (e *exchange) stale() bool {
	return e.answered() && e.err != nil && time.Now().After(e.until)
}

// dropStale keeps names that exist nowhere, of which data can make up any
// number, from piling up. What is forbidden exists, and must be tried first.
func (x *exchanges) dropStale() {
	for name, e := range x.byName {
		if e.stale() && !e.forbidden {
			delete(x.byName, name)
		}
	}
}

// forget has the next use of name checked again.
func (x *exchanges) forget(name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e := x.byName[name]; e != nil && e.answered() {
		delete(x.byName, name)
	}
}

func (x *exchanges) forgetAll() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for name, e := range x.byName {
		if e.answered() {
			delete(x.byName, name)
		}
	}
}

// run answers lookups, one after the other, until ctx ends.
func (x *exchanges) run(ctx context.Context) {
	for {
		name, ok := x.first()
		if !ok {
			select {
			case <-x.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		err, ok := x.find(ctx, name)
		if !ok {
			return
		}
		x.answer(name, err)
	}
}

func (x *exchanges) first() (string, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.pending) == 0 {
		return "", false
	}
	return x.pending[0], true
}

func (x *exchanges) answer(name string, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.pending = x.pending[1:]
	e := x.byName[name]
	e.err, e.until = err, time.Now().Add(absentFor)
	close(e.known)
}

// find asks until the broker has answered; a lost connection is no answer. It
// returns false when ctx has ended.
func (x *exchanges) find(ctx context.Context, name string) (verdict error, ok bool) {
	var wait backoff
	for {
		c := x.link.wait(ctx)
		if c == nil {
			return nil, false
		}
		verdict, err := x.ask(c, name)
		if err == nil {
			return verdict, true
		}
		if !sleep(ctx, wait.next()) {
			return nil, false
		}
	}
}

// ask returns the broker's verdict on name, nil if messages can be sent there,
// or an error if there was none.
func (x *exchanges) ask(c *conn, name string) (verdict, err error) {
	// The type is not compared in a passive declare.
	verdict, err = x.onChannel(c, func(ch *amqp.Channel) error {
		return ch.ExchangeDeclarePassive(name, amqp.ExchangeTopic, true, false, false, false, nil)
	})
	if err != nil || verdict == nil {
		return nil, err
	}
	if !isCode(verdict, amqp.NotFound) {
		return unroutable(codeOf(verdict), name, "", fmt.Errorf("check exchange %q: %w", name, verdict)), nil
	}
	if !x.declare {
		return unroutable(amqp.NotFound, name, "", fmt.Errorf("exchange %q does not exist: %w", name, verdict)), nil
	}
	verdict, err = x.onChannel(c, func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(name, amqp.ExchangeTopic, true, false, false, false, nil)
	})
	if verdict != nil {
		verdict = unroutable(codeOf(verdict), name, "", fmt.Errorf("declare exchange %q: %w", name, verdict))
	}
	return verdict, err
}

// onChannel runs request on a channel of its own, because a negative answer
// closes the channel. It tells the broker's verdict from a failure to get one.
func (x *exchanges) onChannel(c *conn, request func(*amqp.Channel) error) (verdict, err error) {
	ch, err := c.channel()
	if err != nil {
		return nil, err
	}
	err = c.call(func() error { return request(ch) })
	if err == nil {
		return nil, c.call(ch.Close)
	}
	var refusal *amqp.Error
	if errors.As(err, &refusal) && refusal.Server && !c.amqp.IsClosed() {
		return refusal, nil
	}
	return nil, err
}

func isCode(err error, code int) bool { return codeOf(err) == code }

// codeOf is the broker's or the library's reply code, 0 if err has none.
func codeOf(err error) int {
	var e *amqp.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}
