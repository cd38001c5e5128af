package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cdcpub/cdcpub/outbox"
)

// The connector's own headers. None starts with "x-": RabbitMQ turns such into
// message annotations, out of the sight of AMQP 1.0 consumers that read
// application properties.
const (
	headerAggregateType    = "aggregate_type"
	headerAggregateID      = "aggregate_id"
	headerTenant           = "tenant"
	headerAggregateVersion = "aggregate_version"
	headerSchemaVersion    = "schema_version"
	headerEventKind        = "event_kind"
	headerOccurredAt       = "occurred_at"
	headerCommittedAt      = "committed_at"
	headerPosition         = "cdcpub_position"
	headerOrigin           = "origin"
	headerTraceParent      = "traceparent"
	headerTraceState       = "tracestate"

	reservedPrefix = "cdcpub_"
)

// reserved reports whether a header name is the connector's alone. A consumer
// relies on them for order and identity, so an application's header of that name
// is left out even where the connector has nothing to say. The trace context is
// not among them: an application without a column for it keeps it in its headers.
func reserved(name string) bool {
	switch name {
	case headerAggregateType, headerAggregateID, headerTenant, headerAggregateVersion, headerSchemaVersion,
		headerEventKind, headerOccurredAt, headerCommittedAt, headerOrigin:
		return true
	default:
		return strings.HasPrefix(name, reservedPrefix)
	}
}

// errSenderSelected concerns CC and BCC. RabbitMQ takes them for further routing
// keys and closes the channel, with the innocent messages in flight on it, when
// their value is not an array (docs: sender-selected distribution).
var errSenderSelected = errors.New("CC and BCC are RabbitMQ's own headers for further routing keys; they are not supported")

func senderSelected(name string) bool { return name == "CC" || name == "BCC" }

// appHeaders is the event's headers column, values as stored.
type appHeaders map[string]json.RawMessage

// parseHeaders reads the headers column: a JSON object, or JSON null for none.
// Of a key that occurs twice, which only the json and text types can hold, the
// last counts, as in jsonb.
func parseHeaders(b []byte) (appHeaders, error) {
	if b == nil {
		return nil, nil
	}
	var app appHeaders
	if err := json.Unmarshal(b, &app); err != nil {
		var wrongType *json.UnmarshalTypeError
		if errors.As(err, &wrongType) {
			return nil, fmt.Errorf("headers are a JSON %s, want an object", wrongType.Value)
		}
		return nil, fmt.Errorf("parse headers: %w", err)
	}
	return app, nil
}

// text returns a header for use in a template: a string's content, anything
// else as its JSON text; false for null and for a header that is not there.
func (h appHeaders) text(name string) (string, bool) {
	raw, ok := h[name]
	if !ok {
		return "", false
	}
	switch raw[0] {
	case 'n':
		return "", false
	case '"':
		return unquote(raw), true
	default:
		return string(raw), true
	}
}

// unquote decodes a JSON string that Unmarshal has checked. An escape of half a
// surrogate pair, which only the json and text types can hold, becomes U+FFFD.
func unquote(raw json.RawMessage) string {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		panic("a JSON string that was valid is not: " + err.Error())
	}
	return s
}

// scalar returns a header's value as AMQP will carry it; false for null. AMQP
// tables and arrays are not used: RabbitMQ drops them when it converts a message
// to another protocol.
func scalar(raw json.RawMessage) (any, bool) {
	switch raw[0] {
	case 'n':
		return nil, false
	case 't':
		return true, true
	case 'f':
		return false, true
	case '"':
		return unquote(raw), true
	case '{', '[':
		return string(raw), true
	default:
		return number(string(raw)), true
	}
}

// number returns an int64 or a float64 if it holds the very number that s says,
// else s itself. A float64 counts as holding it if its shortest decimal form,
// which is what the consumer's language prints, is the same number.
func number(s string) any {
	if i, err := strconv.ParseInt(s, 10, 64); err == nil {
		return i
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return s
	}
	want, ok := parseDecimal(s)
	got, _ := parseDecimal(strconv.FormatFloat(f, 'e', -1, 64))
	if !ok || got != want {
		return s
	}
	return f
}

// decimal is a number as 0.digits times ten to the exponent, with neither
// leading nor trailing zeros, so that equal numbers are equal structs. It does
// no arithmetic: the exponent of 1e999999999 costs nothing.
type decimal struct {
	negative bool
	digits   string
	exponent int
}

// parseDecimal reads a JSON number; false if its exponent is beyond reason.
func parseDecimal(s string) (decimal, bool) {
	var d decimal
	s, d.negative = strings.CutPrefix(s, "-")
	if i := strings.IndexAny(s, "eE"); i >= 0 {
		exponent, err := strconv.ParseInt(s[i+1:], 10, 32)
		if err != nil {
			return decimal{}, false
		}
		d.exponent, s = int(exponent), s[:i]
	}
	whole, fraction, _ := strings.Cut(s, ".")
	d.exponent += len(whole)
	digits := whole + fraction
	trimmed := strings.TrimLeft(digits, "0")
	d.exponent -= len(digits) - len(trimmed)
	d.digits = strings.TrimRight(trimmed, "0")
	if d.digits == "" {
		d.exponent = 0
	}
	return d, true
}

// buildHeaders writes the application's headers first, then the configured ones,
// and the connector's last: the later one has a name that several have.
func (r *Router) buildHeaders(e *outbox.Event, app appHeaders) (map[string]any, error) {
	const own = 12
	h := make(map[string]any, own+len(app)+len(r.headers))
	for name, raw := range app {
		if senderSelected(name) {
			return nil, errSenderSelected
		}
		if reserved(name) {
			continue
		}
		if v, ok := scalar(raw); ok {
			h[name] = v
		}
	}
	for i := range r.headers {
		// Without a value, as from a NULL column, the header is absent: the
		// application's of the same name must not show through row by row.
		if v, missing := r.headers[i].value.render(e, app); missing == "" {
			h[r.headers[i].name] = v
		} else {
			delete(h, r.headers[i].name)
		}
	}
	ownHeaders(h, e)
	return h, nil
}

func ownHeaders(h map[string]any, e *outbox.Event) {
	text := func(name, value string) {
		if value != "" {
			h[name] = value
		}
	}
	text(headerAggregateType, e.Aggregate.Type)
	text(headerAggregateID, e.Aggregate.ID)
	text(headerTenant, e.Aggregate.Tenant)
	text(headerEventKind, string(e.Kind))
	text(headerOccurredAt, timestamp(e.OccurredAt))
	text(headerCommittedAt, timestamp(e.CommittedAt))
	text(headerOrigin, string(e.Origin))
	text(headerTraceParent, e.TraceParent)
	text(headerTraceState, e.TraceState)
	if e.Aggregate.Versioned {
		h[headerAggregateVersion] = e.Aggregate.Version
	}
	if e.SchemaVersion != "" {
		h[headerSchemaVersion] = schemaVersion(e.SchemaVersion)
	}
	if !e.Position.Tx.IsZero() {
		h[headerPosition] = position(uint64(e.Position.Tx), e.Position.Done)
	}
}

// schemaVersion returns an int64 for a canonical integer. "01" is not one: as a
// number it could not be told from "1".
func schemaVersion(s string) any {
	if v, err := strconv.ParseInt(s, 10, 64); err == nil && strconv.FormatInt(v, 10) == s {
		return v
	}
	return s
}

func timestamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// position formats "%016X/%08d": both parts have a fixed width, so positions
// sort as texts. A transaction of 100 million events and more widens its ordinals.
func position(tx, ordinal uint64) string {
	const upperHex = "0123456789ABCDEF"
	b := make([]byte, 16, 25)
	for i := range b {
		b[i] = upperHex[tx>>(60-4*i)&0xF]
	}
	b = append(b, '/')
	for limit := uint64(10_000_000); limit > ordinal && limit > 1; limit /= 10 {
		b = append(b, '0')
	}
	return string(strconv.AppendUint(b, ordinal, 10))
}
