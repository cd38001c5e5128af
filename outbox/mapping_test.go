package outbox

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func mustBind(t testing.TB, cols []Column, want Columns) *Mapping {
	t.Helper()
	m, err := Bind("public.outbox", cols, want)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// fullTable has every column, and one that nobody asked for.
func fullTable() []Column {
	return debezium(
		Column{"note", oidText}, Column{"version", oidInt8}, Column{"schema_version", oidInt4}, Column{"kind", oidText},
		Column{"occurred_at", oidTimestampTZ}, Column{"tenant", oidText}, Column{"headers", oidJSONB},
		Column{"traceparent", oidText}, Column{"tracestate", oidText}, Column{"region", oidText}, Column{"shard", oidInt4})
}

// row is a row of fullTable with some values replaced; "NULL" is NULL.
func row(replace map[string]string) [][]byte {
	values := map[string]string{
		"id": "0195a3a8-4f2b-7d1e-8c55-6f0f2d1f0a01", "aggregatetype": "order", "aggregateid": "4711", "type": "OrderPaid",
		"payload": `{"n": 12345678901234567890, "a": 2.50}`, "note": "ignored", "version": "7", "schema_version": "2", "kind": "delta",
		"occurred_at": "2026-01-02 03:04:05.123456+00", "tenant": "acme", "headers": `{"k": 1}`,
		"traceparent": "00-ab-cd-01", "tracestate": "v=1", "region": "eu", "shard": "NULL",
	}
	for k, v := range replace {
		values[k] = v
	}
	cols := fullTable()
	out := make([][]byte, len(cols))
	for i, c := range cols {
		if v := values[c.Name]; v != "NULL" {
			out[i] = []byte(v)
		}
	}
	return out
}

func TestEventHoldsWhatTheRowSays(t *testing.T) {
	m := mustBind(t, fullTable(), Columns{Extra: []string{"shard", "region"}})
	got := m.Event(row(nil))
	want := Event{
		ID:            "0195a3a8-4f2b-7d1e-8c55-6f0f2d1f0a01",
		Aggregate:     Aggregate{Tenant: "acme", Type: "order", ID: "4711", Version: 7, Versioned: true},
		Type:          "OrderPaid",
		SchemaVersion: "2",
		Kind:          KindDelta,
		OccurredAt:    time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC),
		Headers:       []byte(`{"k": 1}`),
		Payload:       []byte(`{"n": 12345678901234567890, "a": 2.50}`),
		ContentType:   "application/json",
		TraceParent:   "00-ab-cd-01",
		TraceState:    "v=1",
		Fields:        []Field{{Name: "shard", Null: true}, {Name: "region", Value: "eu"}},
		Table:         "public.outbox",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestEventOfANarrowRowIsTheSame(t *testing.T) {
	m := mustBind(t, fullTable(), Columns{Extra: []string{"shard", "region"}, Tenant: Unmapped})
	wide := row(nil)
	var narrow [][]byte
	for i, c := range fullTable() {
		if indexOf([]Column{{"note", 0}, {"tenant", 0}}, c.Name) < 0 {
			narrow = append(narrow, wide[i])
		}
	}
	n := m.Narrow()
	if diff := cmp.Diff(m.Event(wide), n.Event(narrow)); diff != "" {
		t.Errorf("-wide +narrow:\n%s", diff)
	}
	if diff := cmp.Diff(m.Names(), n.Names()); diff != "" {
		t.Errorf("names: -wide +narrow:\n%s", diff)
	}
}

func TestEventKeepsNoneOfTheCallersBytes(t *testing.T) {
	m := mustBind(t, fullTable(), Columns{Extra: []string{"region"}})
	buffers := row(nil)
	got := m.Event(buffers)
	for _, b := range buffers {
		for i := range b {
			b[i] = 'X'
		}
	}
	if diff := cmp.Diff(m.Event(row(nil)), got); diff != "" {
		t.Errorf("the event changed with the buffers: -want +got:\n%s", diff)
	}
}

func TestNullMeansNotThere(t *testing.T) {
	m := mustBind(t, fullTable(), Columns{})
	got := m.Event(row(map[string]string{
		"type": "NULL", "payload": "NULL", "version": "NULL", "schema_version": "NULL", "kind": "NULL", "occurred_at": "NULL",
		"tenant": "NULL", "headers": "NULL", "traceparent": "NULL", "tracestate": "NULL",
	}))
	want := Event{
		ID: "0195a3a8-4f2b-7d1e-8c55-6f0f2d1f0a01", Aggregate: Aggregate{Type: "order", ID: "4711"},
		ContentType: "application/json", Table: "public.outbox",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestARowThatCannotBePublishedSaysWhy(t *testing.T) {
	const event = `table public.outbox, event "0195a3a8-4f2b-7d1e-8c55-6f0f2d1f0a01": `
	m := mustBind(t, fullTable(), Columns{})
	for name, c := range map[string]struct {
		column, value, want string
	}{
		"a NULL event ID":                 {"id", "NULL", `table public.outbox, event "": the event ID is empty or NULL`},
		"an empty event ID":               {"id", "", "the event ID is empty or NULL"},
		"a NULL aggregate ID":             {"aggregateid", "NULL", event + "the aggregate ID is empty or NULL"},
		"an empty aggregate ID":           {"aggregateid", "", event + "the aggregate ID is empty or NULL"},
		"a NULL aggregate type":           {"aggregatetype", "NULL", event + "the aggregate type is empty or NULL"},
		"an empty aggregate type":         {"aggregatetype", "", event + "the aggregate type is empty or NULL"},
		"a kind that is none":             {"kind", "created", event + `kind "created" is none of delta, snapshot, tombstone`},
		"an empty kind":                   {"kind", "", event + `kind "" is none of`},
		"a kind in other letters":         {"kind", "Delta", event + `kind "Delta" is none of`},
		"a version beyond 64 bits":        {"version", "9223372036854775808", event + "version"},
		"a time that never comes":         {"occurred_at", "infinity", event + `timestamp "infinity" cannot be represented`},
		"a time that always was":          {"occurred_at", "-infinity", event + "timestamp"},
		"a time before Christ":            {"occurred_at", "0044-03-15 12:00:00+00 BC", event + "timestamp"},
		"the time that Go calls zero":     {"occurred_at", "0001-01-01 00:00:00+00", event + "timestamp"},
		"a year of five digits":           {"occurred_at", "10000-01-01 00:00:00+00", event + "timestamp"},
		"a time in another DateStyle":     {"occurred_at", "02/01/2026 03:04:05 UTC", event + "timestamp"},
		"a time without its offset":       {"occurred_at", "2026-01-02 03:04:05", event + "timestamp"},
		"a time in a half-hour zone":      {"occurred_at", "2026-01-02 03:04:05+05:30", event + "timestamp"},
		"a day that the calendar has not": {"occurred_at", "2026-02-30 03:04:05+00", event + "timestamp"},
	} {
		t.Run(name, func(t *testing.T) {
			e := m.Event(row(map[string]string{c.column: c.value}))
			if e.Malformed == nil || !strings.Contains(e.Malformed.Error(), c.want) {
				t.Fatalf("malformed: %v, want %q", e.Malformed, c.want)
			}
			if string(e.Payload) != `{"n": 12345678901234567890, "a": 2.50}` || e.Type != "OrderPaid" {
				t.Errorf("the rest of the row is missing: %+v", e)
			}
		})
	}
}

func TestARowOfAnotherShapeIsMalformed(t *testing.T) {
	m := mustBind(t, fullTable(), Columns{})
	if e := m.Event(row(nil)[:3]); e.Malformed == nil || e.Table != "public.outbox" {
		t.Errorf("a short row came through: %+v", e)
	}
}

func TestPayloadByType(t *testing.T) {
	for name, c := range map[string]struct {
		oid         uint32
		value       string
		payload     string
		contentType string
		malformed   bool
	}{
		"jsonb verbatim":                 {oid: oidJSONB, value: `{"a": 2.50}`, payload: `{"a": 2.50}`, contentType: "application/json"},
		"json with its white space":      {oid: oidJSON, value: " {\"a\" :\n1e2} ", payload: " {\"a\" :\n1e2} ", contentType: "application/json"},
		"text":                           {oid: oidText, value: "a,b", payload: "a,b", contentType: "text/plain"},
		"varchar":                        {oid: oidVarchar, value: "", payload: "", contentType: "text/plain"},
		"xml":                            {oid: oidXML, value: "<a/>", payload: "<a/>", contentType: "application/xml"},
		"bytea":                          {oid: oidBytea, value: `\x00FFab5c`, payload: "\x00\xff\xab\\", contentType: "application/octet-stream"},
		"bytea of no bytes":              {oid: oidBytea, value: `\x`, payload: "", contentType: "application/octet-stream"},
		"bytea in the escape form":       {oid: oidBytea, value: `abc\000`, contentType: "application/octet-stream", malformed: true},
		"bytea with an odd digit":        {oid: oidBytea, value: `\xabc`, contentType: "application/octet-stream", malformed: true},
		"bytea with something not a hex": {oid: oidBytea, value: `\xzz`, contentType: "application/octet-stream", malformed: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := mustBind(t, retyped("payload", c.oid, debezium()), Columns{})
			e := m.Event([][]byte{[]byte("1"), []byte("order"), []byte("2"), []byte("t"), []byte(c.value)})
			if (e.Malformed != nil) != c.malformed {
				t.Fatalf("malformed: %v", e.Malformed)
			}
			if e.ContentType != c.contentType || string(e.Payload) != c.payload {
				t.Errorf("got %q as %s", e.Payload, e.ContentType)
			}
			if (e.Payload == nil) != c.malformed {
				t.Errorf("payload nil: %v; a NULL and an empty payload must differ", e.Payload == nil)
			}
		})
	}
}

func TestOccurredAtByType(t *testing.T) {
	for name, c := range map[string]struct {
		oid   uint32
		value string
		want  time.Time
	}{
		"a timestamptz": {oidTimestampTZ, "2026-01-02 03:04:05+00", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
		"a timestamptz in a session of elsewhere":  {oidTimestampTZ, "2026-01-02 03:04:05.5-02", time.Date(2026, 1, 2, 5, 4, 5, 5e8, time.UTC)},
		"a timestamp, which counts as UTC":         {oidTimestamp, "2026-01-02 03:04:05.000001", time.Date(2026, 1, 2, 3, 4, 5, 1000, time.UTC)},
		"a time with the last microsecond of 9999": {oidTimestampTZ, "9999-12-31 23:59:59.999999+00", time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC)},
	} {
		t.Run(name, func(t *testing.T) {
			m := mustBind(t, debezium(Column{"occurred_at", c.oid}), Columns{})
			e := m.Event([][]byte{[]byte("1"), []byte("order"), []byte("2"), []byte("t"), nil, []byte(c.value)})
			if e.Malformed != nil || e.OccurredAt != c.want {
				t.Errorf("got %v (%v), want %v", e.OccurredAt, e.Malformed, c.want)
			}
		})
	}
}

func FuzzMapping(f *testing.F) {
	f.Add([]byte("1"), []byte("order"), []byte("2"), []byte(`\x00`), []byte("7"), []byte("delta"), []byte("2026-01-02 03:04:05+00"), uint8(0))
	f.Add([]byte(""), []byte("o"), []byte("2"), []byte("x"), []byte("-"), []byte(""), []byte("infinity"), uint8(3))
	cols := retyped("payload", oidBytea, debezium(Column{"version", oidInt8}, Column{"kind", oidText}, Column{"occurred_at", oidTimestampTZ}))
	m := mustBind(f, cols, Columns{})
	f.Fuzz(func(t *testing.T, id, kind, aggregate, payload, version, eventKind, at []byte, nulls uint8) {
		values := [][]byte{id, kind, aggregate, []byte("t"), payload, version, eventKind, at}
		for i := range values {
			if nulls&(1<<i) != 0 {
				values[i] = nil
			}
		}
		e := m.Event(values)
		if e.Malformed == nil && (e.ID == "" || e.Aggregate.ID == "" || e.Aggregate.Type == "") {
			t.Errorf("an event without identity came through: %+v", e)
		}
		if diff := cmp.Diff(e, m.Narrow().Event(values), cmpopts.IgnoreFields(Event{}, "Malformed")); diff != "" {
			t.Errorf("-wide +narrow:\n%s", diff)
		}
		if e.Malformed == nil && values[4] != nil && len(e.Payload) != len(bytes.TrimPrefix(values[4], []byte(`\x`)))/2 {
			t.Errorf("payload of %d bytes from %q", len(e.Payload), values[4])
		}
	})
}

func BenchmarkEvent(b *testing.B) {
	m := mustBind(b, fullTable(), Columns{})
	values := row(nil)
	b.ReportAllocs()
	for b.Loop() {
		if e := m.Event(values); e.Malformed != nil {
			b.Fatal(e.Malformed)
		}
	}
}
