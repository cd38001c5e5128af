package publish

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/tcp"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 10 * time.Second
	// rpcTimeout bounds what the library waits for without a limit: the answer
	// to a channel.open, a declare, a connection.close.
	rpcTimeout = 10 * time.Second
)

// backoff yields delays with full jitter, so that connectors which lost a broker
// at the same moment do not come back at the same moment.
type backoff struct{ failures int }

func (b *backoff) next() time.Duration {
	limit := min(maxBackoff, minBackoff<<min(b.failures, 10))
	b.failures++
	return rand.N(limit)
}

// sleep returns early, with false, when ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// link keeps one connection to a broker alive.
type link struct {
	name    string                   // of the connection, as the broker shows it
	targets func() ([]target, error) // as they are now; never empty
	next    int                      // index of the target to dial next
	dial    func(ctx context.Context, network, addr string) (net.Conn, error)
	log     hclog.Logger
	counts  *counts
	// onUp, if set, is called for each new connection before it is used.
	onUp func()
	// turn is held by the lane that looks for the message that ends the whole
	// connection.
	turn chan struct{}

	mu      sync.Mutex
	current *conn
	changed chan struct{} // closed and replaced when current changes
}

func (p *Publisher) newLink(name string, targets func() ([]target, error), first int) *link {
	return &link{
		name: name, targets: targets, next: first,
		dial: p.cfg.dial, log: p.log.With("connection", name), counts: &p.counts,
		turn: make(chan struct{}, 1), changed: make(chan struct{}),
	}
}

// run connects, for ever, until ctx ends.
func (k *link) run(ctx context.Context) {
	var dials, losses backoff
	var complained string // the last reason logged as a warning
	for ctx.Err() == nil {
		at, c, err := k.connectNext(ctx)
		wait := &dials
		if err == nil {
			k.log.Info("connected to broker", "broker", at.String())
			complained, dials = "", backoff{}
			up := time.Now()
			err = k.serve(ctx, c)
			// A connection that lives for moments only, such as one that a bad
			// message ends again and again, must not turn into a busy loop.
			if time.Since(up) > maxBackoff {
				losses = backoff{}
			}
			wait = &losses
		}
		if ctx.Err() != nil {
			return
		}
		if wait == &losses {
			k.counts.lost.Add(1)
		}
		k.counts.failed(err)
		delay := wait.next()
		level := hclog.Warn
		if err.Error() == complained {
			level = hclog.Debug // an outage is reported once, not every ten seconds
		}
		complained = err.Error()
		k.log.Log(level, "no connection to broker", "broker", at.String(), "error", err, "retry_in", delay.Round(time.Millisecond))
		if !sleep(ctx, delay) {
			return
		}
	}
}

// connectNext tries the target whose turn it is. That has no name where there is
// none, since the URLs cannot be read.
func (k *link) connectNext(ctx context.Context) (at target, c *conn, err error) {
	targets, err := k.targets()
	if err != nil {
		return at, nil, err
	}
	at = targets[k.next%len(targets)]
	k.next++
	c, err = k.connect(ctx, at)
	return at, c, err
}

// serve makes c available until it is lost, and returns the reason.
func (k *link) serve(ctx context.Context, c *conn) error {
	if k.onUp != nil {
		k.onUp()
	}
	k.set(c)
	err := k.watch(ctx, c)
	if err == nil { // ctx has ended; abort must still find c
		_ = c.amqp.CloseDeadline(time.Now().Add(rpcTimeout)) // end cuts it in any case
		c.end(nil)
		k.set(nil)
		return nil
	}
	k.set(nil) // before the end, which takes a moment: no lane may take c now
	c.end(err)
	return err
}

// watch follows the state of c. It must always be ready to receive: the library
// drops a notification that is not taken within five seconds (amqp091-go #349),
// and a lost "unblocked" would pause the lanes for ever.
func (k *link) watch(ctx context.Context, c *conn) error {
	blocks := c.blocks
	for {
		select {
		case b, ok := <-blocks:
			if !ok {
				blocks = nil // the connection is closing; lost says why
				continue
			}
			c.setBlocked(b.Active)
			if b.Active {
				// Under a memory alarm the broker closes its receive window for as long
				// as it lasts.
				c.transport.setUserTimeout(0)
				k.log.Warn("broker blocks publishing", "reason", b.Reason)
			} else {
				c.transport.setUserTimeout(tcp.UserTimeout)
				k.log.Info("broker no longer blocks publishing")
			}
		case e := <-c.lost:
			return c.reason(e)
		case <-ctx.Done():
			return nil
		}
	}
}

func (k *link) set(c *conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.current = c
	close(k.changed)
	k.changed = make(chan struct{})
}

func (k *link) get() *conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.current
}

// wait returns the live connection, once there is one; nil when ctx has ended.
func (k *link) wait(ctx context.Context) *conn {
	for {
		k.mu.Lock()
		c, changed := k.current, k.changed
		k.mu.Unlock()
		if c != nil && !c.amqp.IsClosed() { // else run is about to notice
			return c
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// abort cuts the current connection, if any.
func (k *link) abort(reason error) {
	if c := k.get(); c != nil {
		c.abort(reason)
	}
}

func (k *link) connect(ctx context.Context, at target) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, at.timeout)
	defer cancel()
	raw, err := k.dial(ctx, "tcp", at.addr())
	if err != nil {
		return nil, fmt.Errorf("dial broker: %w", err)
	}
	inner := raw
	if at.tls != nil {
		secured := tls.Client(raw, at.tls.Clone())
		if err := secured.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, fmt.Errorf("tls handshake with broker: %w", err)
		}
		inner = secured
	}
	t := newTransport(inner, raw)
	// amqp.Open has neither a context nor a timeout of its own.
	unhook := context.AfterFunc(ctx, t.Abort)
	opened, err := amqp.Open(t, at.config(k.name))
	if !unhook() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		t.Abort()
		<-t.done
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("open amqp connection: %w", err)
	}
	return &conn{
		amqp:      opened,
		transport: t,
		lost:      opened.NotifyClose(make(chan *amqp.Error, 1)),
		blocks:    opened.NotifyBlocked(make(chan amqp.Blocking, 16)),
	}, nil
}

// conn is one connection from its handshake to its end.
type conn struct {
	amqp      *amqp.Connection
	transport *transport
	lost      chan *amqp.Error
	blocks    chan amqp.Blocking

	mu          sync.Mutex
	cause       error         // why we gave it up ourselves
	unblocked   chan struct{} // non-nil while blocked; closed at its end
	unblockedAt time.Time
}

func (c *conn) setBlocked(active bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case active && c.unblocked == nil:
		c.unblocked = make(chan struct{})
	case !active && c.unblocked != nil:
		close(c.unblocked)
		c.unblocked, c.unblockedAt = nil, time.Now()
	}
}

// blocked returns nil, or a channel that is closed when the broker allows
// publishing again.
func (c *conn) blocked() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unblocked
}

// patience returns how much longer to wait for the confirm of a message sent at
// sent. Time during which the broker blocks the connection does not count; it
// reads nothing then.
func (c *conn) patience(sent time.Time, timeout time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unblocked != nil {
		return timeout
	}
	if c.unblockedAt.After(sent) {
		sent = c.unblockedAt
	}
	return timeout - time.Since(sent)
}

// abort gives the connection up for reason and cuts it. The library notices at
// its next read and ends its channels.
func (c *conn) abort(reason error) {
	c.mu.Lock()
	if c.cause == nil {
		c.cause = reason
	}
	c.mu.Unlock()
	c.transport.Abort()
}

// reason says why the connection was lost; e is what the library reports, nil
// if it had no more to say.
func (c *conn) reason(e *amqp.Error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.cause != nil:
		return c.cause
	case e == nil:
		return errors.New("connection closed")
	case !e.Server: // the library wraps I/O errors in a code of its own
		return errors.New(e.Reason)
	default:
		return fmt.Errorf("closed by the broker: %w", e)
	}
}

// end makes sure that nothing of the connection is left: not the socket, of
// which the library lets go late if at all, and not bytes on their way to the
// broker, which must not arrive after what the next connection sends.
func (c *conn) end(reason error) {
	var e *amqp.Error
	if reason == nil || errors.As(reason, &e) {
		<-c.transport.done // the farewell, bounded by flushTimeout
	}
	c.transport.Abort()
	<-c.transport.done
}

// channel opens a channel. It is bounded: a broker that does not answer loses
// the connection.
func (c *conn) channel() (*amqp.Channel, error) {
	var ch *amqp.Channel
	err := c.call(func() (err error) {
		ch, err = c.amqp.Channel()
		return err
	})
	return ch, err
}

// call runs one request of the library that waits for the broker's answer.
func (c *conn) call(request func() error) error {
	watchdog := time.AfterFunc(rpcTimeout, func() {
		c.abort(fmt.Errorf("no answer from the broker for %s", rpcTimeout))
	})
	defer watchdog.Stop()
	return request()
}
