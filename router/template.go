package router

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cdcpub/cdcpub/outbox"
)

// template is a text with placeholders in braces; {{ and }} are literal braces.
type template struct {
	source string
	parts  []part
}

// part is a literal or, if value is set, a placeholder.
type part struct {
	text  string // the literal, or the placeholder without its braces
	value valueFunc
}

// valueFunc returns a placeholder's value for one event; false means that there
// is none, which an empty text is not.
type valueFunc func(e *outbox.Event, app appHeaders) (string, bool)

// compile parses source. columns are the names that {column.x} may use.
func compile(source string, columns []string) (*template, error) {
	t := &template{source: source}
	var literal strings.Builder
	flush := func() {
		if literal.Len() > 0 {
			t.parts = append(t.parts, part{text: literal.String()})
			literal.Reset()
		}
	}
	for rest := source; rest != ""; {
		i := strings.IndexAny(rest, "{}")
		if i < 0 {
			literal.WriteString(rest)
			break
		}
		literal.WriteString(rest[:i])
		brace := rest[i]
		rest = rest[i:]
		if len(rest) > 1 && rest[1] == brace {
			literal.WriteByte(brace)
			rest = rest[2:]
			continue
		}
		if brace == '}' {
			return nil, fmt.Errorf("template %q: a } without its {; a literal one is written }}", source)
		}
		name, after, ok := strings.Cut(rest[1:], "}")
		if !ok {
			return nil, fmt.Errorf("template %q: a { without its }; a literal one is written {{", source)
		}
		value, err := placeholder(name, columns)
		if err != nil {
			return nil, fmt.Errorf("template %q: %w", source, err)
		}
		flush()
		t.parts = append(t.parts, part{text: name, value: value})
		rest = after
	}
	flush()
	return t, nil
}

// render returns t for e, or in missing the name of a placeholder that has no
// value.
func (t *template) render(e *outbox.Event, app appHeaders) (s, missing string) {
	if len(t.parts) == 1 && t.parts[0].value == nil {
		return t.parts[0].text, ""
	}
	for i := range t.parts {
		p := &t.parts[i]
		v := p.text
		if p.value != nil {
			var ok bool
			if v, ok = p.value(e, app); !ok {
				return "", p.text
			}
		}
		s += v // two or three parts: cheaper than a builder
	}
	return s, ""
}

func placeholder(name string, columns []string) (valueFunc, error) {
	if column, ok := strings.CutPrefix(name, "column."); ok {
		return columnPlaceholder(column, columns)
	}
	if key, ok := strings.CutPrefix(name, "header."); ok && key != "" {
		return func(_ *outbox.Event, app appHeaders) (string, bool) { return app.text(key) }, nil
	}
	if count, ok := strings.CutPrefix(name, "partition:"); ok {
		return partitionPlaceholder(count)
	}
	switch name {
	case "aggregate_type":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.Aggregate.Type, true }, nil
	case "aggregate_id":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.Aggregate.ID, true }, nil
	case "type":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.Type, true }, nil
	case "tenant":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.Aggregate.Tenant, true }, nil
	case "schema_version":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.SchemaVersion, e.SchemaVersion != "" }, nil
	case "id":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.ID, true }, nil
	case "table":
		return func(e *outbox.Event, _ appHeaders) (string, bool) { return e.Table, true }, nil
	}
	return nil, fmt.Errorf("unknown placeholder {%s}; the nearest known one is {%s}", name, nearest(name, columns))
}

func columnPlaceholder(name string, columns []string) (valueFunc, error) {
	if !slices.Contains(columns, name) {
		return nil, fmt.Errorf("{column.%s}: %q is not among the extra columns (%s)", name, name, strings.Join(columns, ", "))
	}
	return func(e *outbox.Event, _ appHeaders) (string, bool) {
		for i := range e.Fields {
			if e.Fields[i].Name == name {
				return e.Fields[i].Value, !e.Fields[i].Null
			}
		}
		return "", false // a table without this column, where several are read
	}, nil
}

// MaxPartitions bounds the N of {partition:N}. Beyond it there would be more
// keys than a broker should have bindings.
const MaxPartitions = 65536

func partitionPlaceholder(count string) (valueFunc, error) {
	n, err := strconv.Atoi(count)
	if err != nil || n < 1 || n > MaxPartitions || strconv.Itoa(n) != count {
		return nil, fmt.Errorf("{partition:%s}: want a number from 1 to %d", count, MaxPartitions)
	}
	return func(e *outbox.Event, _ appHeaders) (string, bool) {
		return strconv.Itoa(Partition(e.Aggregate.ID, n)), true
	}, nil
}

// Partition returns the partition of an aggregate among n, from 0 to n-1:
// FNV-1a of 64 bits over the UTF-8 bytes of its ID, its halves folded together,
// modulo n. Without the fold a power of two for n would see only the low bits of
// each byte, and "A1" and "Q1" always share a partition. It is part of the message
// format and never changes; n must be positive.
func Partition(aggregateID string, n int) int {
	hash := fnv1a(aggregateID)
	return int((hash ^ hash>>32) % uint64(n))
}

// fnv1a is written out because the specification is: hash/fnv would say the same
// through an interface and a copy of the string.
func fnv1a(s string) uint64 {
	hash := uint64(0xcbf29ce484222325)
	for i := range len(s) {
		hash ^= uint64(s[i])
		hash *= 0x100000001b3
	}
	return hash
}

// nearest returns the placeholder that name was most likely meant to be.
func nearest(name string, columns []string) string {
	known := []string{
		"aggregate_type", "aggregate_id", "type", "tenant", "schema_version", "id", "table",
		"column.NAME", "header.NAME", "partition:N",
	}
	for _, c := range columns {
		known = append(known, "column."+c)
	}
	return slices.MinFunc(known, func(a, b string) int { return distance(name, a) - distance(name, b) })
}

// distance is the number of single-byte edits between a and b (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substitute := diagonal
			if a[i] != b[j] {
				substitute++
			}
			diagonal = row[j+1]
			row[j+1] = min(substitute, diagonal+1, row[j]+1)
		}
	}
	return row[len(b)]
}

// checkHeaderName refuses names that a configured header must not have.
func checkHeaderName(name string) error {
	switch {
	case name == "":
		return errors.New("the name is empty")
	case reserved(name):
		return errors.New("the name belongs to the connector")
	case senderSelected(name):
		return errSenderSelected
	default:
		return nil
	}
}
