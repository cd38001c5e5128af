package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/router"
)

// entry is one unsettled message. The lane's sender and settler use it in turn.
type entry struct {
	seq      uint64
	m        router.Message
	accepted time.Time

	// verdict, if not zero, is what will be reported; the message is not sent.
	verdict router.Kind
	reason  error

	confirm  *amqp.DeferredConfirmation // nil unless sent on the current channel
	sentAt   time.Time
	inFlight bool // its message_id is in lane.ids
	kills    int  // channels that ended while it was alone in flight
	trial    bool // it tries, alone in flight, whether its exchange is still forbidden
}

func newEntry(seq uint64, m router.Message, maxBody int) *entry {
	e := &entry{seq: seq, m: m, accepted: time.Now()}
	if err := validate(&e.m, maxBody); err != nil {
		e.decide(router.Refused, err)
	}
	return e
}

func (e *entry) decide(kind router.Kind, reason error) { e.verdict, e.reason = kind, reason }

// lane is one FIFO of messages and the channel that they go through.
type lane struct {
	p    *Publisher
	link *link
	log  hclog.Logger
	wake chan struct{} // capacity 1: the sender has something to look at

	mu       sync.Mutex
	queue    []*entry            // unsettled, in the order of Publish
	sent     int                 // queue[:sent] was handed to the settler
	ids      map[string]struct{} // message_ids in flight
	proven   bool                // the broker has answered on this channel
	suspects int                 // queue[:suspects] is being isolated

	// Of the sender.
	soleLink bool // isolate on the whole connection, not just the channel
	hasTurn  bool // holds link.turn

	// Of the settler.
	timeout time.Duration // for the oldest confirm
}

func newLane(p *Publisher, index int, k *link) *lane {
	return &lane{
		p: p, link: k, log: k.log.With("lane", index), wake: make(chan struct{}, 1),
		ids: make(map[string]struct{}), timeout: p.cfg.ConfirmTimeout,
	}
}

func (l *lane) add(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, e)
	l.signal()
}

func (l *lane) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *lane) load() (unsettled, sent int, oldest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) > 0 {
		oldest = time.Since(l.queue[0].accepted)
	}
	return len(l.queue), l.sent, oldest
}

// session is one channel from its opening to its end.
type session struct {
	conn     *conn
	ch       *amqp.Channel
	closed   chan *amqp.Error
	cause    error // what closed delivered; nil if nothing
	returns  chan amqp.Return
	returned map[string]error // returns read but not yet matched, by message_id
	inFlight chan *entry      // from sender to settler, in order
}

// run sends what is in the queue, on one channel after the other, until ctx
// ends.
func (l *lane) run(ctx context.Context) {
	var wait backoff
	for {
		c := l.link.wait(ctx)
		if c == nil {
			return
		}
		answered, explained := l.serve(ctx, c)
		if answered {
			wait = backoff{}
		}
		// A channel that a message has ended says nothing against the broker, and
		// innocent messages wait behind it: the next one opens at once. That is no
		// busy loop. A channel with several messages in flight has settled one
		// before (see take); one message alone ends maxKills channels at most and
		// is settled. So the channels are few for each message that leaves the
		// lane, and one that the caller submits again has the caller's backoff.
		// Where the connection ended too, link.wait waits for the next one, and
		// the link has a backoff of its own.
		if explained {
			continue
		}
		if !sleep(ctx, wait.next()) {
			return
		}
	}
}

// serve opens a channel on c and sends until the channel ends. It reports
// whether the broker has answered for any message, and whether one explains the
// end.
func (l *lane) serve(ctx context.Context, c *conn) (answered, explained bool) {
	s, err := l.open(c)
	if err != nil {
		if ctx.Err() == nil && !c.amqp.IsClosed() { // else the link reports it
			l.p.counts.failed(err)
			l.log.Warn("cannot open channel", "error", err)
		}
		return false, false
	}
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		l.settle(ctx, s)
	}()
	l.send(ctx, s)
	close(s.inFlight)
	<-settled
	if ctx.Err() != nil {
		return false, false
	}
	return l.rewind(s)
}

func (l *lane) open(c *conn) (*session, error) {
	ch, err := c.channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	size := l.p.cfg.PerChannel
	s := &session{
		conn:   c,
		ch:     ch,
		closed: ch.NotifyClose(make(chan *amqp.Error, 1)),
		// As many as can be in flight: the library drops a return that finds
		// this full for five seconds, and the ack that follows it would then
		// make a lost message look published.
		returns:  ch.NotifyReturn(make(chan amqp.Return, size)),
		returned: make(map[string]error),
		inFlight: make(chan *entry, size),
	}
	if err := c.call(func() error { return ch.Confirm(false) }); err != nil {
		return nil, fmt.Errorf("select confirms: %w", err)
	}
	return s, nil
}

// send hands messages to the channel until the channel or ctx ends.
func (l *lane) send(ctx context.Context, s *session) {
	for l.awaitTurn(ctx, s) {
		e := l.take()
		if e == nil {
			if !l.await(ctx, s, l.wake) {
				return
			}
			continue
		}
		if e.verdict == 0 && !l.checkExchange(ctx, s, e) {
			return
		}
		if e.verdict == 0 && !l.publish(ctx, s, e) {
			return
		}
		s.inFlight <- e // has room: take lets no more than its capacity through
	}
}

// await waits for ready. It returns false when the channel or ctx has ended.
func (l *lane) await(ctx context.Context, s *session, ready <-chan struct{}) bool {
	select {
	case <-ready:
		return true
	case e := <-s.closed:
		s.ended(e)
		return false
	case <-ctx.Done():
		return false
	}
}

// ended notes why the channel ended; a closed notification says nothing new.
func (s *session) ended(e *amqp.Error) {
	if e != nil {
		s.cause = e
	}
}

// take returns the next message to send, or nil if there is none or it must
// wait for others to be settled.
func (l *lane) take() *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sent == len(l.queue) {
		return nil
	}
	limit := l.p.cfg.PerChannel
	if !l.proven || l.suspects > 0 {
		limit = 1
	}
	if l.sent >= limit || l.sent > 0 && l.queue[l.sent-1].trial {
		return nil
	}
	e := l.queue[l.sent]
	if e.verdict == 0 {
		if _, twin := l.ids[e.m.ID]; twin {
			return nil
		}
		l.ids[e.m.ID] = struct{}{}
		e.inFlight = true
	}
	l.sent++
	return e
}

// checkExchange decides e if its exchange cannot be published to. It returns
// false when the channel or ctx has ended before that was known.
func (l *lane) checkExchange(ctx context.Context, s *session, e *entry) bool {
	if e.m.Exchange == "" { // the default exchange always exists
		return true
	}
	if !e.trial { // else its channel has died, and it is sent again
		x, trial := l.p.exchanges.lookup(e.m.Exchange)
		if !x.answered() && !l.await(ctx, s, x.known) {
			return false
		}
		if x.err != nil && !trial {
			e.decide(router.Returned, x.err)
		}
		e.trial = trial
	}
	return !e.trial || l.awaitAlone(ctx, s)
}

// awaitAlone waits until only the message that was taken last is unsettled. If
// that ends the channel, as a trial well may, no innocent one is sent twice. It
// returns false when the channel or ctx has ended.
func (l *lane) awaitAlone(ctx context.Context, s *session) bool {
	for {
		l.mu.Lock()
		alone := l.sent == 1
		l.mu.Unlock()
		if alone {
			return true
		}
		if !l.await(ctx, s, l.wake) {
			return false
		}
	}
}

// publish sends e, unless it does not fit the connection: then it decides e. It
// returns false when the channel or ctx has ended.
func (l *lane) publish(ctx context.Context, s *session, e *entry) bool {
	// The broker may have negotiated less than validate reckons with.
	if limit := s.conn.amqp.Config.FrameSize - frameOverhead; limit < maxProperties {
		if n := propertiesSize(&e.m); n > limit {
			e.decide(router.Refused, fmt.Errorf("properties and headers are %d bytes: a frame of this broker holds %d", n, limit))
			return true
		}
	}
	if unblocked := s.conn.blocked(); unblocked != nil && !l.await(ctx, s, unblocked) {
		return false
	}
	e.sentAt = time.Now()
	dc, err := s.ch.PublishWithDeferredConfirm(e.m.Exchange, e.m.RoutingKey, l.p.cfg.Mandatory, false, publishing(&e.m))
	if err != nil {
		if !errors.Is(err, amqp.ErrClosed) {
			s.conn.abort(fmt.Errorf("publish: %w", err))
		}
		l.await(ctx, s, nil) // for the reason
		return false
	}
	e.confirm = dc
	return true
}

func publishing(m *router.Message) amqp.Publishing {
	return amqp.Publishing{
		Headers:      amqp.Table(m.Headers),
		ContentType:  m.ContentType,
		DeliveryMode: amqp.Persistent,
		MessageId:    m.ID,
		Timestamp:    m.Timestamp,
		Type:         m.Type,
		AppId:        m.AppID,
		Body:         m.Body,
	}
}

// rewind makes everything unsettled unsent again, after s has ended and the
// settler with it. It reports whether the broker has answered for anything on s,
// and whether a message explains the end.
func (l *lane) rewind(s *session) (answered, explained bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var sent []*entry
	for _, e := range l.queue[:l.sent] {
		if e.confirm != nil {
			sent = append(sent, e)
		}
	}
	explained = l.blame(s, sent)
	for _, e := range sent {
		if e.verdict == 0 { // else it has just been found to be to blame
			l.p.counts.resent.Add(1)
		}
	}
	for _, e := range l.queue[:l.sent] {
		e.confirm, e.inFlight = nil, false
	}
	clear(l.ids)
	answered = l.proven
	l.sent, l.proven = 0, false
	return answered, explained
}
