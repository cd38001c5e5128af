package outbox

import (
	"fmt"
	"strings"
)

// Unmapped as the name of an optional column leaves it unmapped although the
// table has a column of the default name: a column that happens to be called
// "version" need not be the aggregate's version.
const Unmapped = "-"

// Columns names the columns of an outbox table. An empty name means the default.
//
// The first five are required and default to Debezium's names: id,
// aggregatetype, aggregateid, type, payload. The others are optional: they are
// mapped by themselves when the table has a column of the default name
// (version, schema_version, kind, occurred_at or else created_at, tenant,
// headers, traceparent, tracestate). One that is named here must exist.
type Columns struct {
	ID            string
	AggregateType string
	AggregateID   string
	Type          string
	Payload       string

	Version       string
	SchemaVersion string
	Kind          string
	OccurredAt    string
	Tenant        string
	Headers       string
	TraceParent   string
	TraceState    string

	// Extra are further columns, for templates and headers. They must exist.
	Extra []string
}

// Column is one column of a table as the server describes it.
type Column struct {
	Name string
	Type uint32 // pg_type.oid
}

// role is what a column means to the connector.
type role int

const (
	roleID role = iota
	roleAggregateType
	roleAggregateID
	roleType
	rolePayload
	roleVersion
	roleSchemaVersion
	roleKind
	roleOccurredAt
	roleTenant
	roleHeaders
	roleTraceParent
	roleTraceState
	roleCount
)

// rule says how the column of one role is found and which types it may have.
type rule struct {
	key      string   // as the configuration calls it
	named    string   // by configuration; empty: one of defaults
	defaults []string // the first that the table has
	required bool
	fits     func(oid uint32) bool
	want     string // what fits, in words
}

func (c *Columns) rules() [roleCount]rule {
	return [roleCount]rule{
		roleID:            {"id", c.ID, []string{"id"}, true, anyType, "any type"},
		roleAggregateType: {"aggregate_type", c.AggregateType, []string{"aggregatetype"}, true, anyType, "any type"},
		roleAggregateID:   {"aggregate_id", c.AggregateID, []string{"aggregateid"}, true, anyType, "any type"},
		roleType:          {"type", c.Type, []string{"type"}, true, anyType, "any type"},
		rolePayload:       {"payload", c.Payload, []string{"payload"}, true, isPayload, "json, jsonb, bytea, text, varchar or xml"},
		roleVersion:       {"version", c.Version, []string{"version"}, false, isInteger, "smallint, integer or bigint"},
		roleSchemaVersion: {"schema_version", c.SchemaVersion, []string{"schema_version"}, false, isIntegerOrText, "smallint, integer, bigint, text or varchar"},
		roleKind:          {"kind", c.Kind, []string{"kind"}, false, isTextOrEnum, "text, varchar or an enum"},
		roleOccurredAt:    {"occurred_at", c.OccurredAt, []string{"occurred_at", "created_at"}, false, isTimestamp, "timestamptz or timestamp"},
		roleTenant:        {"tenant", c.Tenant, []string{"tenant"}, false, anyType, "any type"},
		roleHeaders:       {"headers", c.Headers, []string{"headers"}, false, isJSONOrText, "json, jsonb, text or varchar"},
		roleTraceParent:   {"traceparent", c.TraceParent, []string{"traceparent"}, false, anyType, "any type"},
		roleTraceState:    {"tracestate", c.TraceState, []string{"tracestate"}, false, anyType, "any type"},
	}
}

// find returns the index in cols of r's column, or -1 if it is optional and not there.
func (r *rule) find(cols []Column) (int, error) {
	if r.named == Unmapped && !r.required {
		return -1, nil
	}
	names := r.defaults
	if r.named != "" {
		names = []string{r.named}
	}
	for _, name := range names {
		if i := indexOf(cols, name); i >= 0 {
			return i, nil
		}
	}
	if r.required || r.named != "" {
		return -1, missing(names[0], r.key, cols)
	}
	return -1, nil
}

// Bind finds the columns of want among cols, which are the table's columns in
// the order in which rows will bring their values. The table is named as
// "schema.name"; it goes into every event and every error.
//
// It refuses a table that lacks a required or named column, one whose column
// has a type that does not fit its role, and a column mapped twice. cols and
// want are not kept.
func Bind(table string, cols []Column, want Columns) (*Mapping, error) {
	m := &Mapping{table: table, width: len(cols)}
	owner := make(map[int]string, len(cols)) // column index -> key that took it
	take := func(i int, key string) error {
		if first, ok := owner[i]; ok {
			return fmt.Errorf("column %q is mapped twice: as %s and as %s", cols[i].Name, first, key)
		}
		owner[i] = key
		return nil
	}
	for r, rule := range want.rules() {
		i, err := rule.find(cols)
		if err == nil && i >= 0 {
			err = take(i, rule.key)
		}
		if err == nil && i >= 0 && !rule.fits(cols[i].Type) {
			err = unfit(cols[i], &rule)
		}
		if err != nil {
			return nil, fmt.Errorf("map table %s: %w", table, err)
		}
		m.index[r] = i
	}
	for _, name := range want.Extra {
		i := indexOf(cols, name)
		if i < 0 {
			return nil, fmt.Errorf("map table %s: %w", table, missing(name, "extra", cols))
		}
		if err := take(i, "extra"); err != nil {
			return nil, fmt.Errorf("map table %s: %w", table, err)
		}
		m.extra = append(m.extra, extra{name: name, index: i})
	}
	m.describe(cols, owner)
	return m, nil
}

func indexOf(cols []Column, name string) int {
	for i := range cols {
		if cols[i].Name == name {
			return i
		}
	}
	return -1
}

func missing(name, key string, cols []Column) error {
	has := make([]string, len(cols))
	for i := range cols {
		has[i] = cols[i].Name
	}
	return fmt.Errorf("no column %q (columns.%s); the table has: %s", name, key, strings.Join(has, ", "))
}

func unfit(c Column, r *rule) error {
	hint := ""
	if !r.required && r.named == "" {
		hint = fmt.Sprintf("; if it means something else, set columns.%s to %q", r.key, Unmapped)
	}
	return fmt.Errorf("column %q (columns.%s) is of type %s, want %s%s", c.Name, r.key, typeName(c.Type), r.want, hint)
}
