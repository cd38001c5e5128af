package outbox

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// debezium are the columns of Debezium's documented table.
func debezium(more ...Column) []Column {
	return append([]Column{
		{"id", oidUUID}, {"aggregatetype", oidVarchar}, {"aggregateid", oidVarchar}, {"type", oidVarchar}, {"payload", oidJSONB},
	}, more...)
}

// retyped replaces the type of one column.
func retyped(name string, oid uint32, cols []Column) []Column {
	cols[indexOf(cols, name)].Type = oid
	return cols
}

func TestBindRefusesATableThatDoesNotFit(t *testing.T) {
	const enum = 16402
	for name, c := range map[string]struct {
		cols []Column
		want Columns
		err  string // a part of the error
	}{
		"a required column is missing, and the table's are listed": {
			cols: debezium()[:4],
			err:  `map table public.outbox: no column "payload" (columns.payload); the table has: id, aggregatetype, aggregateid, type`,
		},
		"a required column that was named is missing": {
			cols: debezium(), want: Columns{ID: "event_id"},
			err: `no column "event_id" (columns.id)`,
		},
		"an optional column that was named is missing": {
			cols: debezium(), want: Columns{Tenant: "customer"},
			err: `no column "customer" (columns.tenant)`,
		},
		"an extra column is missing": {
			cols: debezium(), want: Columns{Extra: []string{"region"}},
			err: `no column "region" (columns.extra)`,
		},
		"a required column cannot be left unmapped": {
			cols: debezium(), want: Columns{Type: Unmapped},
			err: `no column "-" (columns.type)`,
		},
		"a column is named for two roles": {
			cols: debezium(), want: Columns{AggregateID: "id"},
			err: `column "id" is mapped twice: as id and as aggregate_id`,
		},
		"an extra column has a role already": {
			cols: debezium(Column{"tenant", oidText}), want: Columns{Extra: []string{"tenant"}},
			err: `column "tenant" is mapped twice: as tenant and as extra`,
		},
		"an extra column is named twice": {
			cols: debezium(Column{"region", oidText}), want: Columns{Extra: []string{"region", "region"}},
			err: `column "region" is mapped twice: as extra and as extra`,
		},
		"a payload of numbers": {
			cols: retyped("payload", oidNumeric, debezium()),
			err:  `column "payload" (columns.payload) is of type numeric, want json, jsonb, bytea, text, varchar or xml`,
		},
		"a payload of a user's type": {
			cols: retyped("payload", enum, debezium()),
			err:  `is of type OID 16402, want json`,
		},
		"a version that is text, with the way out": {
			cols: debezium(Column{"version", oidText}),
			err:  `column "version" (columns.version) is of type text, want smallint, integer or bigint; if it means something else, set columns.version to "-"`,
		},
		"a schema version with a fraction": {
			cols: debezium(Column{"schema_version", oidNumeric}), err: `(columns.schema_version) is of type numeric`,
		},
		"a kind that is a number":    {cols: debezium(Column{"kind", oidInt4}), err: `(columns.kind) is of type integer, want text, varchar or an enum`},
		"a time that is a number":    {cols: debezium(Column{"occurred_at", oidInt8}), err: `(columns.occurred_at) is of type bigint, want timestamptz or timestamp`},
		"a time that is a date":      {cols: debezium(Column{"created_at", oidDate}), err: `column "created_at" (columns.occurred_at) is of type date`},
		"headers that are bytes":     {cols: debezium(Column{"headers", oidBytea}), err: `(columns.headers) is of type bytea, want json, jsonb, text or varchar`},
		"a named version that is no": {cols: debezium(Column{"v", oidFloat8}), want: Columns{Version: "v"}, err: `is of type double precision, want smallint, integer or bigint`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Bind("public.outbox", c.cols, c.want)
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want it to hold %q", err, c.err)
			}
		})
	}
}

func TestBindTakesTheColumnsThatAreThere(t *testing.T) {
	const enum = 16402
	everything := debezium(
		Column{"note", oidText}, Column{"version", oidInt8}, Column{"schema_version", oidInt4}, Column{"kind", enum},
		Column{"occurred_at", oidTimestampTZ}, Column{"created_at", oidTimestampTZ}, Column{"tenant", oidInt4},
		Column{"headers", oidJSONB}, Column{"traceparent", oidText}, Column{"tracestate", oidText})
	for name, c := range map[string]struct {
		cols    []Column
		want    Columns
		names   string
		orderBy string
	}{
		"Debezium's table": {debezium(), Columns{}, "id aggregatetype aggregateid type payload", "id"},
		"every optional column, occurred_at before created_at": {
			everything, Columns{},
			"id aggregatetype aggregateid type payload version schema_version kind occurred_at tenant headers traceparent tracestate", "version id",
		},
		"created_at where there is no occurred_at": {
			debezium(Column{"created_at", oidTimestamp}), Columns{}, "id aggregatetype aggregateid type payload created_at", "id",
		},
		"optional columns that are to be left alone": {
			debezium(Column{"version", oidText}, Column{"created_at", oidInt8}), Columns{Version: Unmapped, OccurredAt: Unmapped},
			"id aggregatetype aggregateid type payload", "id",
		},
		"names of one's own, in the table's order": {
			[]Column{{"data", oidBytea}, {"rev", oidInt2}, {"what", oidText}, {"who", oidInt8}, {"of", oidText}, {"nr", oidInt8}, {"zone", oidText}},
			Columns{ID: "nr", AggregateType: "of", AggregateID: "who", Type: "what", Payload: "data", Version: "rev", Extra: []string{"zone"}},
			"data rev what who of nr zone", "rev nr",
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Bind("public.outbox", c.cols, c.want)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.Fields(c.names), m.Names()); diff != "" {
				t.Errorf("names: -want +got:\n%s", diff)
			}
			if diff := cmp.Diff(strings.Fields(c.orderBy), m.OrderBy()); diff != "" {
				t.Errorf("order: -want +got:\n%s", diff)
			}
		})
	}
}
