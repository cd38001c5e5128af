package router

import "time"

// Message is an event as RabbitMQ will see it. The publisher owns it, including
// its body and headers, from Publish until the outcome.
type Message struct {
	Exchange    string
	RoutingKey  string
	ID          string // message_id
	Type        string
	AppID       string
	ContentType string
	Timestamp   time.Time // zero: absent; AMQP carries whole seconds from 1970 on
	// Headers hold scalars only (string, int64, float64, bool): nested tables are
	// lost in RabbitMQ's protocol conversions.
	Headers map[string]any
	Body    []byte
	// OrderKey names the aggregate: messages with an equal key keep their order.
	OrderKey string
}

// Kind is what became of one message.
type Kind uint8

// The kinds of outcome. Only Confirmed means that the broker holds the message.
const (
	// Confirmed: acknowledged by the broker and not returned.
	Confirmed Kind = iota + 1
	// Returned: no queue, no exchange, or no right to publish to it.
	Returned
	// Nacked: a queue rejected it (full with reject-publish, or failed).
	Nacked
	// Refused: the message itself cannot be published: too large, not
	// representable in AMQP.
	Refused
)

// String names k as logs and metrics do.
func (k Kind) String() string {
	switch k {
	case Confirmed:
		return "confirmed"
	case Returned:
		return "returned"
	case Nacked:
		return "nacked"
	case Refused:
		return "refused"
	default:
		return "unknown"
	}
}

// Outcome ends the publisher's ownership of one message.
type Outcome struct {
	Seq  uint64
	Kind Kind
	Err  error // nil if Confirmed
}
