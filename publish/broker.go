package publish

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"

	"github.com/hashicorp/go-hclog"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/tcp"
)

// Broker is a connection for those who look at a broker or set it up. It is not
// safe for concurrent use. Its methods wait for the broker's answer, for at most
// ten seconds each.
type Broker struct {
	conn *conn
	at   target
}

// OpenFailure says which step of getting into a broker failed, as each has a cure
// of its own.
type OpenFailure string

// The steps.
const (
	FailedURL     OpenFailure = "url"     // the URL cannot be used
	FailedReach   OpenFailure = "reach"   // nothing answers, or no TLS, or no AMQP
	FailedLogin   OpenFailure = "login"   // user or password
	FailedNoVhost OpenFailure = "vhost"   // the virtual host does not exist
	FailedAccess  OpenFailure = "access"  // the user has no rights at all in the virtual host
	FailedLimit   OpenFailure = "refused" // anything else that the broker said
)

// OpenError is why OpenBroker failed. It holds no secret.
type OpenError struct {
	Failure OpenFailure
	Broker  string // as Broker.String; empty if the URL cannot be used
	User    string
	Vhost   string
	Err     error
}

func (e *OpenError) Error() string { return e.Err.Error() }

func (e *OpenError) Unwrap() error { return e.Err }

// OpenBroker connects to the broker of one URL, as the publisher would. The error
// is an *OpenError. Name is shown in the broker's list of connections; a nil
// config verifies an amqps server against the system's authorities.
func OpenBroker(ctx context.Context, url string, config *tls.Config, name string) (*Broker, error) {
	at, err := parseTarget(url, config)
	if err != nil {
		return nil, &OpenError{Failure: FailedURL, Err: err}
	}
	k := link{name: name, dial: tcp.NewDialer().DialContext, log: hclog.NewNullLogger()}
	c, err := k.connect(ctx, at)
	if err != nil {
		return nil, &OpenError{Failure: openFailure(err), Broker: at.String(), User: at.uri.Username, Vhost: at.uri.Vhost, Err: err}
	}
	return &Broker{conn: c, at: at}, nil
}

// openFailure goes by the code of the broker's answer, and where one code has two
// meanings, by its text (rabbit_access_control.erl, rabbit_reader.erl).
func openFailure(err error) OpenFailure {
	var e *amqp.Error
	switch {
	case !errors.As(err, &e):
		return FailedReach
	case e.Code == amqp.AccessRefused:
		return FailedLogin
	case e.Code == amqp.NotAllowed && strings.Contains(e.Reason, "not found"):
		return FailedNoVhost
	case e.Code == amqp.NotAllowed && strings.Contains(e.Reason, "refused for user"):
		return FailedAccess
	case e.Server:
		return FailedLimit
	default:
		return FailedReach
	}
}

// User is whom the broker knows us as.
func (b *Broker) User() string { return b.at.uri.Username }

// Vhost is the virtual host that the connection is in.
func (b *Broker) Vhost() string { return b.at.uri.Vhost }

// String names the broker without user and password.
func (b *Broker) String() string { return b.at.String() }

// Close says good-bye and closes the connection.
func (b *Broker) Close() {
	_ = b.conn.call(b.conn.amqp.Close) // an error says that it is closed already
	b.conn.end(nil)
}

// Answer is what the broker says to a question.
type Answer string

// The answers.
const (
	Yes       Answer = "yes"
	Missing   Answer = "missing"   // it does not exist
	Forbidden Answer = "forbidden" // the user has no right, or nobody has
)

// answer runs a question on a channel of its own, since "no" closes the channel.
func (b *Broker) answer(question func(*amqp.Channel) error) (Answer, error) {
	ch, err := b.conn.channel()
	if err != nil {
		return "", err
	}
	err = b.conn.call(func() error { return question(ch) })
	if err == nil {
		return Yes, b.conn.call(ch.Close)
	}
	var e *amqp.Error
	if !errors.As(err, &e) || !e.Server || b.conn.amqp.IsClosed() {
		return "", err
	}
	switch e.Code {
	case amqp.NotFound:
		return Missing, nil
	case amqp.AccessRefused:
		return Forbidden, nil
	default:
		return "", e
	}
}

// ExchangeExists asks for an exchange, which takes no right, and from RabbitMQ
// 4.3.1 on any one right on it (release notes). The default exchange
// is always there.
func (b *Broker) ExchangeExists(name string) (Answer, error) {
	if name == "" {
		return Yes, nil
	}
	a, err := b.answer(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclarePassive(name, amqp.ExchangeTopic, true, false, false, false, nil)
	})
	if err != nil {
		return a, fmt.Errorf("ask for exchange %q: %w", name, err)
	}
	return a, nil
}

// MayPublish asks whether the user may write to an exchange, with a message that
// no queue ever gets: the broker checks rights when it receives a publish, and
// routes those of a transaction at its commit (rabbit_channel.erl), which never
// comes. While the broker blocks publishers it does not answer either: the error is
// then a *BlockedError, and the connection is lost.
func (b *Broker) MayPublish(exchange, key string) (Answer, error) {
	a, err := b.answer(func(ch *amqp.Channel) error {
		if err := ch.Tx(); err != nil {
			return err
		}
		if err := ch.PublishWithContext(context.Background(), exchange, key, true, false, amqp.Publishing{}); err != nil {
			return err
		}
		return ch.TxRollback()
	})
	if err == nil {
		return a, nil
	}
	// The notice comes before the silence, or there is none.
	select {
	case blocking := <-b.conn.blocks:
		if blocking.Active {
			err = &BlockedError{Reason: blocking.Reason}
		}
	default:
	}
	return a, fmt.Errorf("ask for the right to write to exchange %q: %w", exchange, err)
}

// BlockedError says that the broker lets nobody publish for lack of a resource
// (https://www.rabbitmq.com/docs/connection-blocked).
type BlockedError struct {
	Reason string // the broker's, such as "low on memory"
}

func (e *BlockedError) Error() string { return "the broker lets nobody publish: " + e.Reason }
