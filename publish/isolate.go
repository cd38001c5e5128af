package publish

import (
	"context"
	"errors"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/router"
)

// maxKills is how many channels a message may end while alone in flight. One
// could be a coincidence, such as an exchange that was deleted and made again.
const maxKills = 2

// blame looks for the message that ended s and reports whether it was ended by
// one; sent are those that were in flight. l.mu is held.
func (l *lane) blame(s *session, sent []*entry) bool {
	var e *amqp.Error
	if len(sent) == 0 || !errors.As(s.cause, &e) || !e.Server || !isBlame(e.Code) {
		return false
	}
	for _, x := range sent {
		if e.Code == amqp.NotFound {
			l.p.exchanges.forget(x.m.Exchange)
		}
	}
	wholeLink := s.conn.amqp.IsClosed()
	if l.suspects == 0 {
		l.p.counts.isolations.Add(1)
		l.log.Warn("broker closed the channel, sending one message at a time to find out which is to blame",
			"messages", len(sent), "error", e)
	}
	l.suspects = max(l.suspects, l.sent)
	l.soleLink = l.soleLink || wholeLink
	// Without the turn, a message of another lane may have ended the connection.
	if len(sent) > 1 || wholeLink && !l.hasTurn {
		return true
	}
	culprit := sent[0]
	if culprit.kills++; culprit.kills < maxKills {
		return true
	}
	kind := router.Refused
	if e.Code == amqp.NotFound || e.Code == amqp.AccessRefused {
		kind = router.Returned
	}
	culprit.decide(kind, unroutable(e.Code, culprit.m.Exchange, culprit.m.RoutingKey,
		fmt.Errorf("broker closed the channel each time it was sent (exchange %q, routing key %q): %w", culprit.m.Exchange, culprit.m.RoutingKey, e)))
	l.log.Warn("found the message that the broker closes the channel for",
		"message_id", culprit.m.ID, "outcome", kind, "error", e)
	if e.Code == amqp.AccessRefused {
		l.p.exchanges.forbid(culprit.m.Exchange, e)
	}
	return true
}

// isBlame tells the errors that one message can cause: no such exchange, no
// right, too large, malformed.
func isBlame(code int) bool {
	switch code {
	case amqp.NotFound, amqp.AccessRefused, amqp.PreconditionFailed, amqp.FrameError:
		return true
	default:
		return false
	}
}

// awaitTurn makes lanes that share a connection isolate one after the other,
// when a message has ended the connection itself. It returns false when the
// channel or ctx has ended.
func (l *lane) awaitTurn(ctx context.Context, s *session) bool {
	if !l.soleLink {
		return true
	}
	l.mu.Lock()
	isolated := l.suspects == 0
	l.mu.Unlock()
	if isolated {
		l.soleLink = false
		l.returnTurn()
		return true
	}
	if l.hasTurn {
		return true
	}
	select {
	case l.link.turn <- struct{}{}:
		l.hasTurn = true
		return true
	case e := <-s.closed:
		s.ended(e)
		return false
	case <-ctx.Done():
		return false
	}
}

func (l *lane) returnTurn() {
	if l.hasTurn {
		<-l.link.turn
		l.hasTurn = false
	}
}
