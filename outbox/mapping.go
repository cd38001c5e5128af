package outbox

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Mapping turns the rows of one table into events. It never changes after Bind
// and may be used by several goroutines.
type Mapping struct {
	table string
	width int
	index [roleCount]int // of the role's column in a row; -1: unmapped
	extra []extra
	names []string // of the mapped columns, in row order
	kinds []string // of those that tell kinds of events apart

	payloadType  uint32
	contentType  string
	timeLayout   string
	versionName  string // empty: unmapped
	identityName string
}

type extra struct {
	name  string
	index int
}

// describe fills what m says about itself and how it reads values by type.
func (m *Mapping) describe(cols []Column, owner map[int]string) {
	for i := range cols {
		if _, ok := owner[i]; ok {
			m.names = append(m.names, cols[i].Name)
		}
	}
	for _, r := range []role{roleAggregateType, roleType, roleTenant, roleSchemaVersion} {
		if i := m.index[r]; i >= 0 {
			m.kinds = append(m.kinds, cols[i].Name)
		}
	}
	m.payloadType = cols[m.index[rolePayload]].Type
	m.contentType = contentType(m.payloadType)
	m.identityName = cols[m.index[roleID]].Name
	if i := m.index[roleVersion]; i >= 0 {
		m.versionName = cols[i].Name
	}
	if i := m.index[roleOccurredAt]; i >= 0 {
		m.timeLayout = timestampLayout
		if cols[i].Type == oidTimestampTZ {
			m.timeLayout = timestampTZLayout
		}
	}
}

// Names returns the mapped columns in row order: what a SELECT must ask for. A
// row that holds these and nothing else is read with the mapping of Narrow.
func (m *Mapping) Names() []string { return slices.Clone(m.names) }

// KindColumns returns the mapped columns that have few values and that exchanges
// are usually made of: aggregate type, event type, tenant and schema version.
func (m *Mapping) KindColumns() []string { return slices.Clone(m.kinds) }

// TextSettings are the session parameters on which the text of a value depends.
// Both sources set them: a row must make the same event whether it comes from the
// log or from the table. The map is the caller's.
func TextSettings() map[string]string {
	return map[string]string{
		"client_encoding":    "UTF8",
		"datestyle":          "ISO, MDY",
		"intervalstyle":      "postgres",
		"timezone":           "UTC",
		"bytea_output":       "hex",
		"extra_float_digits": "3",
		"search_path":        "pg_catalog",
	}
}

// Narrow returns the mapping for rows that hold just the columns of Names, in
// that order.
func (m *Mapping) Narrow() *Mapping {
	used := make([]int, 0, len(m.names))
	for _, i := range m.index {
		if i >= 0 {
			used = append(used, i)
		}
	}
	for _, x := range m.extra {
		used = append(used, x.index)
	}
	slices.Sort(used)

	n := *m
	n.width = len(used)
	for r, i := range m.index {
		n.index[r] = slices.Index(used, i) // stays -1 where it was
	}
	n.extra = make([]extra, len(m.extra))
	for k, x := range m.extra {
		n.extra[k] = extra{name: x.name, index: slices.Index(used, x.index)}
	}
	return &n
}

// OrderBy returns the columns that give old rows their order: the aggregate's
// version if it is mapped, then the event ID. By the ID alone rows of one
// aggregate come in key order, which need not be the order of their commits.
func (m *Mapping) OrderBy() []string {
	if m.versionName == "" {
		return []string{m.identityName}
	}
	return []string{m.versionName, m.identityName}
}

// Event reads one row. The values come in the order of the columns given to
// Bind, in PostgreSQL's text form under TextSettings; nil is NULL. Whatever it
// keeps it copies, so the caller may reuse its buffers.
//
// It fills everything except Origin, CommittedAt and Position, which the source
// knows. A row that cannot be published has its reason in Malformed, with the
// other fields as far as they could be read.
func (m *Mapping) Event(values [][]byte) Event {
	e := Event{Table: m.table, ContentType: m.contentType}
	if len(values) != m.width {
		e.Malformed = fmt.Errorf("table %s: row has %d values, want %d", m.table, len(values), m.width)
		return e
	}
	text := func(r role) string { return string(m.value(values, r)) }
	e.ID = text(roleID)
	e.Aggregate = Aggregate{Tenant: text(roleTenant), Type: text(roleAggregateType), ID: text(roleAggregateID)}
	e.Type = text(roleType)
	e.SchemaVersion = text(roleSchemaVersion)
	e.TraceParent = text(roleTraceParent)
	e.TraceState = text(roleTraceState)
	e.Headers = bytes.Clone(m.value(values, roleHeaders))
	if len(m.extra) > 0 {
		e.Fields = make([]Field, len(m.extra))
		for k, x := range m.extra {
			v := values[x.index]
			e.Fields[k] = Field{Name: x.name, Value: string(v), Null: v == nil}
		}
	}
	if err := m.parse(&e, values); err != nil {
		e.Malformed = fmt.Errorf("table %s, event %q: %w", m.table, e.ID, err)
	}
	return e
}

// value returns nil for a role that is unmapped, as for NULL.
func (m *Mapping) value(values [][]byte, r role) []byte {
	if m.index[r] < 0 {
		return nil
	}
	return values[m.index[r]]
}

// parse fills the fields that not every text fits, all of them whatever fails,
// and returns the first problem.
func (m *Mapping) parse(e *Event, values [][]byte) error {
	var errs [5]error
	errs[0] = e.checkIdentity()
	e.Aggregate.Version, e.Aggregate.Versioned, errs[1] = parseVersion(m.value(values, roleVersion))
	e.Kind, errs[2] = parseKind(m.value(values, roleKind))
	e.OccurredAt, errs[3] = parseTime(m.value(values, roleOccurredAt), m.timeLayout)
	e.Payload, errs[4] = m.parsePayload(m.value(values, rolePayload))
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// checkIdentity refuses what a consumer could neither deduplicate nor order.
// NULL and the empty text are the same to it.
func (e *Event) checkIdentity() error {
	switch {
	case e.ID == "":
		return errors.New("the event ID is empty or NULL")
	case e.Aggregate.ID == "":
		return errors.New("the aggregate ID is empty or NULL")
	case e.Aggregate.Type == "":
		return errors.New("the aggregate type is empty or NULL")
	default:
		return nil
	}
}

// parseVersion takes NULL for "this event has no version": a table may hold
// both kinds.
func parseVersion(v []byte) (version int64, ok bool, err error) {
	if v == nil {
		return 0, false, nil
	}
	version, err = strconv.ParseInt(string(v), 10, 64)
	if err != nil {
		return 0, false, fmt.Errorf("version %q is not a 64-bit integer", v)
	}
	return version, true, nil
}

func parseKind(v []byte) (Kind, error) {
	if v == nil {
		return KindUnstated, nil
	}
	switch k := Kind(v); k {
	case KindDelta, KindSnapshot, KindTombstone:
		return k, nil
	default:
		return KindUnstated, fmt.Errorf("kind %q is none of %s, %s, %s", v, KindDelta, KindSnapshot, KindTombstone)
	}
}

// The forms that DateStyle ISO gives a timestamp; time.Parse takes a fraction
// of a second after them by itself. A session in UTC prints the offset "+00".
const (
	timestampLayout   = "2006-01-02 15:04:05"
	timestampTZLayout = "2006-01-02 15:04:05-07"
)

// parseTime reads a timestamp, one without a time zone as UTC. What Go's
// time.Time or RFC 3339 cannot say is refused and never replaced: infinity,
// years before Christ, years of five digits.
func parseTime(v []byte, layout string) (time.Time, error) {
	if v == nil {
		return time.Time{}, nil
	}
	t, err := time.Parse(layout, string(v))
	if err != nil || t.IsZero() {
		return time.Time{}, fmt.Errorf("timestamp %q cannot be represented", v)
	}
	return t.UTC(), nil
}

func (m *Mapping) parsePayload(v []byte) ([]byte, error) {
	if m.payloadType != oidBytea || v == nil {
		return bytes.Clone(v), nil
	}
	digits, ok := bytes.CutPrefix(v, []byte(`\x`))
	if !ok {
		return nil, errors.New(`the bytea payload is not in hexadecimal form; the session needs bytea_output = hex`)
	}
	b := make([]byte, hex.DecodedLen(len(digits)))
	if _, err := hex.Decode(b, digits); err != nil {
		return nil, fmt.Errorf("decode bytea payload: %w", err)
	}
	return b, nil
}
