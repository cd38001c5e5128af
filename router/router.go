package router

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cdcpub/cdcpub/outbox"
)

// Defaults of Config: Debezium's topic becomes the exchange, its key the
// routing key.
const (
	DefaultExchange   = "outbox.event.{aggregate_type}"
	DefaultRoutingKey = "{aggregate_id}"
	DefaultMessageID  = "{id}"
)

// Config is how events become messages. Exchange, RoutingKey, MessageID and the
// values of Headers are templates; docs/message-format.md lists the placeholders.
// An empty Exchange, RoutingKey or MessageID means the default, so RabbitMQ's
// nameless exchange cannot be chosen: it has no bindings, so that the connector's
// configuration would have to know the consumers' queues.
type Config struct {
	Exchange   string
	RoutingKey string
	MessageID  string
	AppID      string            // the same for every message; empty: absent
	Headers    map[string]string // header name -> template
	Columns    []string          // the extra columns that {column.x} may name
}

// Router turns events into messages. It never changes after New and may be used
// by several goroutines.
type Router struct {
	exchange   *template
	routingKey *template
	messageID  *template
	appID      string
	headers    []header
}

type header struct {
	name  string
	value *template
}

// New compiles the templates of c. It refuses an unknown placeholder with the
// nearest known one, and a header name that belongs to the connector.
func New(c Config) (*Router, error) {
	r := &Router{appID: c.AppID}
	for _, t := range []struct {
		key, source, standard string
		into                  **template
	}{
		{"exchange", c.Exchange, DefaultExchange, &r.exchange},
		{"routing_key", c.RoutingKey, DefaultRoutingKey, &r.routingKey},
		{"message_id", c.MessageID, DefaultMessageID, &r.messageID},
	} {
		source := t.source
		if source == "" {
			source = t.standard
		}
		compiled, err := compile(source, c.Columns)
		if err != nil {
			return nil, fmt.Errorf("compile %s: %w", t.key, err)
		}
		*t.into = compiled
	}
	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		if err := checkHeaderName(name); err != nil {
			return nil, fmt.Errorf("configure header %q: %w", name, err)
		}
		compiled, err := compile(c.Headers[name], c.Columns)
		if err != nil {
			return nil, fmt.Errorf("compile header %q: %w", name, err)
		}
		r.headers = append(r.headers, header{name, compiled})
	}
	return r, nil
}

// Route returns the message for e. The message shares e's payload and nothing
// else. An error means that this event cannot be published as it stands, now or
// later, under this configuration; it names the table and the event ID.
func (r *Router) Route(e *outbox.Event) (Message, error) {
	if e.Malformed != nil {
		return Message{}, e.Malformed // names table and event already
	}
	m, err := r.route(e)
	if err != nil {
		return Message{}, fmt.Errorf("table %s, event %q: %w", e.Table, e.ID, err)
	}
	return m, nil
}

func (r *Router) route(e *outbox.Event) (Message, error) {
	app, err := parseHeaders(e.Headers)
	if err != nil {
		return Message{}, err
	}
	m := Message{
		Type:        e.Type,
		AppID:       r.appID,
		ContentType: e.ContentType,
		Timestamp:   amqpTime(e.OccurredAt),
		Body:        e.Payload,
		OrderKey:    OrderKey(e),
	}
	if m.Exchange, err = r.exchange.require(e, app, "exchange"); err != nil {
		return Message{}, err
	}
	// An empty routing key is a key: fanout and headers exchanges ignore it.
	var missing string
	if m.RoutingKey, missing = r.routingKey.render(e, app); missing != "" {
		return Message{}, noValue(missing, "routing_key")
	}
	if m.ID, err = r.messageID.require(e, app, "message_id"); err != nil {
		return Message{}, err
	}
	m.Headers, err = r.buildHeaders(e, app)
	return m, err
}

// amqpTime returns t if an AMQP timestamp can carry it, else zero. It has no
// sign: a time before 1970 would arrive as one in a future beyond all calendars.
func amqpTime(t time.Time) time.Time {
	if t.Before(time.Unix(0, 0)) {
		return time.Time{}
	}
	return t
}

// require renders t for a property that must not be empty.
func (t *template) require(e *outbox.Event, app appHeaders, property string) (string, error) {
	s, missing := t.render(e, app)
	if missing != "" {
		return "", noValue(missing, property)
	}
	if s == "" {
		return "", fmt.Errorf("%s template %q gives an empty text", property, t.source)
	}
	return s, nil
}

func noValue(placeholder, property string) error {
	return fmt.Errorf("{%s} in the %s template has no value", placeholder, property)
}

// OrderKey names e's aggregate. It is the key also of events that Route
// refuses: what comes after them must still wait for them. The parts are
// separated by NUL, which PostgreSQL stores in no text.
func OrderKey(e *outbox.Event) string {
	return strings.Join([]string{e.Aggregate.Tenant, e.Aggregate.Type, e.Aggregate.ID}, "\x00")
}
