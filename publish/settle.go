package publish

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cdcpub/cdcpub/router"
)

// maxConfirmTimeout ends the doubling of Config.ConfirmTimeout.
const maxConfirmTimeout = 10 * time.Minute

var errNacked = errors.New("nacked by the broker: a queue is full or has failed")

// settle turns confirms into outcomes, in the order of sending, until the
// sender has ended, the channel has died, or ctx ends.
//
// It uses deferred confirmations only. The library's NotifyPublish reports a
// message as acknowledged that was nacked, when the nack came out of order and
// an ack of several messages spans it later; RabbitMQ does send that (confirms.go,
// Multiple, in amqp091-go 1.16; rabbit_channel.erl, coalesce_and_send).
func (l *lane) settle(ctx context.Context, s *session) {
	var next *entry // received, but not part of the last batch
	for {
		e := next
		if e == nil {
			var ok bool
			if e, ok = <-s.inFlight; !ok {
				return
			}
		}
		if !l.awaitConfirm(ctx, s, e) {
			return
		}
		var batch []*entry
		batch, next = collect(s, e)
		now := time.Now()
		// The library delivers a return before it completes the confirm that
		// follows it. So every return that belongs to the batch is here now.
		s.readReturns()
		outcomes := make([]router.Outcome, 0, len(batch))
		answered := false
		for _, e := range batch {
			o, known := s.outcome(e)
			if !known {
				break
			}
			answered = answered || e.confirm != nil
			if e.trial && e.confirm != nil { // not forbidden any more
				l.p.exchanges.forget(e.m.Exchange)
			}
			outcomes = append(outcomes, o)
		}
		if answered {
			l.timeout = l.p.cfg.ConfirmTimeout
		}
		l.p.counts.latency.settled(batch, outcomes, now)
		l.pop(len(outcomes), answered)
		l.p.emit(outcomes)
		if len(outcomes) < len(batch) {
			return // the channel is dead: the rest will be sent again
		}
	}
}

// awaitConfirm waits until the broker has answered for e, or the channel has
// died. It returns false when ctx has ended. If e is unconfirmed for too long,
// it gives the connection up: such confirms are known never to come (RabbitMQ
// issues #6115, #14589).
func (l *lane) awaitConfirm(ctx context.Context, s *session, e *entry) bool {
	if e.isDone() {
		return true
	}
	timer := time.NewTimer(s.conn.patience(e.sentAt, l.timeout))
	defer timer.Stop()
	for {
		select {
		case <-e.confirm.Done():
			return true
		case <-ctx.Done():
			return false
		case <-timer.C:
			if left := s.conn.patience(e.sentAt, l.timeout); left > 0 {
				timer.Reset(left)
				continue
			}
			s.conn.abort(fmt.Errorf("no confirm from the broker for %s", l.timeout))
			l.timeout = max(l.timeout, min(2*l.timeout, maxConfirmTimeout))
		}
	}
}

// isDone reports whether nothing more will be learned of e on its channel.
func (e *entry) isDone() bool {
	if e.confirm == nil {
		return true
	}
	select {
	case <-e.confirm.Done():
		return true
	default:
		return false
	}
}

// collect adds to first what is done right behind it. The entry that is not, if
// one was received, comes back as next.
func collect(s *session, first *entry) (batch []*entry, next *entry) {
	batch = []*entry{first}
	for len(batch) < maxBatch {
		select {
		case e, ok := <-s.inFlight:
			if !ok {
				return batch, nil
			}
			if !e.isDone() {
				return batch, e
			}
			batch = append(batch, e)
		default:
			return batch, nil
		}
	}
	return batch, nil
}

// readReturns notes the returns that have arrived.
func (s *session) readReturns() {
	for {
		select {
		case r, ok := <-s.returns:
			if !ok { // closed with the channel
				return
			}
			s.returned[r.MessageId] = unroutable(int(r.ReplyCode), r.Exchange, r.RoutingKey,
				fmt.Errorf("returned by the broker: %d %s (exchange %q, routing key %q)", r.ReplyCode, r.ReplyText, r.Exchange, r.RoutingKey))
		default:
			return
		}
	}
}

// outcome says what became of e, which is done. It returns false if that is
// unknown because the channel died first.
func (s *session) outcome(e *entry) (router.Outcome, bool) {
	o := router.Outcome{Seq: e.seq, Kind: e.verdict, Err: e.reason}
	if e.verdict != 0 {
		return o, true
	}
	if err, ok := s.returned[e.m.ID]; ok {
		delete(s.returned, e.m.ID)
		o.Kind, o.Err = router.Returned, err
		return o, true
	}
	switch {
	case e.confirm.Acked():
		o.Kind = router.Confirmed
	case s.ch.IsClosed():
		// The library completes confirms that never came as if they were
		// nacked, but marks the channel as closed before it does.
		return o, false
	default:
		o.Kind, o.Err = router.Nacked, errNacked
	}
	return o, true
}

// pop removes the first n messages, which are settled. answered says that the
// broker has answered for one of them.
func (l *lane) pop(n int, answered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, e := range l.queue[:n] {
		if e.inFlight {
			delete(l.ids, e.m.ID)
		}
		l.queue[i] = nil
	}
	l.queue = l.queue[n:]
	l.sent -= n
	l.suspects = max(0, l.suspects-n)
	l.proven = l.proven || answered
	l.signal()
}
