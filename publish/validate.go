package publish

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cdcpub/cdcpub/router"
)

const (
	maxShortString = 255 // AMQP 0-9-1 short string, in bytes

	// frameMax is what RabbitMQ offers by default and what we ask for. A body is
	// split over frames, but all properties and headers of a message travel in
	// one content header frame.
	frameMax = 131072
	// frameOverhead is what that frame holds besides properties: 7 bytes of
	// frame header, 14 of class, weight, body size and flags, one end byte; the
	// rest is a margin.
	frameOverhead = 64
	// maxProperties is the limit on properties and headers as encoded.
	maxProperties = frameMax - frameOverhead
)

// validate says why m cannot be published, or nil. It is strict because the
// broker's (and for short strings the library's) answer to an invalid message is
// to close the channel or the connection, with every innocent message on it.
func validate(m *router.Message, maxBody int) error {
	if m.ID == "" {
		return errors.New("message_id is empty: returns could not be told apart")
	}
	shorts := [...]struct{ name, value string }{
		{"exchange", m.Exchange}, {"routing key", m.RoutingKey}, {"message_id", m.ID},
		{"type", m.Type}, {"app_id", m.AppID}, {"content_type", m.ContentType},
	}
	for _, s := range shorts {
		if len(s.value) > maxShortString {
			return fmt.Errorf("%s is %d bytes: AMQP allows %d", s.name, len(s.value), maxShortString)
		}
	}
	if strings.IndexByte(m.Exchange, 0) >= 0 {
		return errors.New("exchange contains a NUL byte")
	}
	if strings.IndexByte(m.RoutingKey, 0) >= 0 {
		return errors.New("routing key contains a NUL byte")
	}
	if len(m.Body) > maxBody {
		return fmt.Errorf("body is %d bytes: the limit is %d", len(m.Body), maxBody)
	}
	for key, value := range m.Headers {
		if len(key) > maxShortString {
			return fmt.Errorf("header name %.40q... is %d bytes: AMQP allows %d", key, len(key), maxShortString)
		}
		switch value.(type) {
		case string, int64, float64, bool:
		default:
			// int among them: the library would silently cut it to 32 bits.
			return fmt.Errorf("header %q has type %T: want string, int64, float64 or bool", key, value)
		}
	}
	if n := propertiesSize(m); n > maxProperties {
		return fmt.Errorf("properties and headers are %d bytes: one AMQP frame holds %d", n, maxProperties)
	}
	return nil
}

// propertiesSize is the encoded size of the properties that publishing sets.
func propertiesSize(m *router.Message) int {
	n := 1 // delivery_mode
	for _, s := range [...]string{m.ContentType, m.ID, m.Type, m.AppID} {
		n += 1 + len(s)
	}
	n += 8 // timestamp
	n += 4 // length of the header table
	for key, value := range m.Headers {
		n += 1 + len(key) + 1
		switch v := value.(type) {
		case string:
			n += 4 + len(v)
		case bool:
			n++
		default: // int64, float64
			n += 8
		}
	}
	return n
}
