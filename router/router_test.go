package router

import (
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"pgregory.net/rapid"
)

func TestNewRefusesWhatItCannotCompile(t *testing.T) {
	columns := []string{"region", "shard_key"}
	for name, c := range map[string]struct {
		config Config
		want   string // in the error
	}{
		"an unknown placeholder, with the nearest one":  {Config{Exchange: "{agregate_type}"}, "unknown placeholder {agregate_type}; the nearest known one is {aggregate_type}"},
		"a column without its prefix":                   {Config{RoutingKey: "{colum.region}"}, "{column.region}"},
		"a column that is not read":                     {Config{RoutingKey: "{column.zone}"}, `"zone" is not among the extra columns (region, shard_key)`},
		"a header without a name":                       {Config{RoutingKey: "{header.}"}, "unknown placeholder {header.}; the nearest known one is {header.NAME}"},
		"no placeholder at all between braces":          {Config{RoutingKey: "{}"}, "unknown placeholder {}"},
		"a brace that is not closed":                    {Config{MessageID: "a{id"}, "a { without its }"},
		"a brace that was not opened":                   {Config{MessageID: "id}"}, "a } without its {"},
		"a placeholder in a placeholder":                {Config{MessageID: "{a{id}}"}, "unknown placeholder {a{id}"},
		"no partitions":                                 {Config{RoutingKey: "{partition:0}"}, "want a number from 1 to 65536"},
		"more partitions than a broker should bind":     {Config{RoutingKey: "{partition:65537}"}, "want a number from 1 to 65536"},
		"a partition count with a sign":                 {Config{RoutingKey: "{partition:+4}"}, "want a number from 1 to 65536"},
		"a partition count that is no number":           {Config{RoutingKey: "{partition:many}"}, "want a number from 1 to 65536"},
		"a configured header of the connector's name":   {Config{Headers: map[string]string{"origin": "x"}}, `header "origin": the name belongs to the connector`},
		"a configured header with the reserved prefix":  {Config{Headers: map[string]string{"cdcpub_x": "x"}}, "the name belongs to the connector"},
		"a configured header without a name":            {Config{Headers: map[string]string{"": "x"}}, "the name is empty"},
		"a configured header that RabbitMQ routes by":   {Config{Headers: map[string]string{"BCC": "x"}}, "further routing keys"},
		"a header template with an unknown placeholder": {Config{Headers: map[string]string{"h": "{tipe}"}}, `header "h": template "{tipe}": unknown placeholder {tipe}; the nearest known one is {type}`},
	} {
		t.Run(name, func(t *testing.T) {
			c.config.Columns = columns
			_, err := New(c.config)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want it to hold %q", err, c.want)
			}
		})
	}
}

func TestOrderKeyTellsAggregatesApart(t *testing.T) {
	key := func(tenant, kind, id string) string {
		return OrderKey(&outbox.Event{Aggregate: outbox.Aggregate{Tenant: tenant, Type: kind, ID: id}})
	}
	seen := map[string][3]string{}
	parts := []string{"", "a", "b", "ab", "a:b", "a.b", "1", "11"}
	for _, tenant := range parts {
		for _, kind := range parts {
			for _, id := range parts {
				k := key(tenant, kind, id)
				if other, ok := seen[k]; ok {
					t.Errorf("%q is the key of %v and of %v", k, other, [3]string{tenant, kind, id})
				}
				seen[k] = [3]string{tenant, kind, id}
			}
		}
	}
}

func TestPartitionOfTheSpecification(t *testing.T) {
	doc, err := os.ReadFile("../docs/message-format.md")
	if err != nil {
		t.Fatal(err)
	}
	// From the published test vectors of FNV: a specification and an
	// implementation that are wrong alike would agree.
	for text, want := range map[string]uint64{"": 0xcbf29ce484222325, "a": 0xaf63dc4c8601ec8c, "foobar": 0x85944171f73967e8} {
		if got := fnv1a(text); got != want {
			t.Errorf("FNV-1a of %q is %#x, want %#x", text, got, want)
		}
	}
	row := regexp.MustCompile("(?m)^\\| `([^`]*)` \\| `0x([0-9a-f]{16})` \\| (\\d+) \\| (\\d+) \\| (\\d+) \\|$")
	rows := row.FindAllStringSubmatch(string(doc), -1)
	if len(rows) < 5 {
		t.Fatalf("the specification has %d worked values", len(rows))
	}
	for _, r := range rows {
		id := r[1]
		for i, n := range []int{4, 16, 1000} {
			want, err := strconv.Atoi(r[3+i])
			if err != nil {
				t.Fatal(err)
			}
			if got := Partition(id, n); got != want {
				t.Errorf("partition of %q among %d is %d, the specification says %d", id, n, got, want)
			}
		}
		hash, err := strconv.ParseUint(r[2], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if got := fnv1a(id); got != hash {
			t.Errorf("hash of %q is %#x, the specification says %#x", id, got, hash)
		}
	}
}

func TestPositionsSortAsTextsLikeEventsInTheLog(t *testing.T) {
	ordered := []offsets.Position{
		{Tx: 1, Done: 1},
		{Tx: 0x16B3747, Done: 1},          // snapshot: one below the consistent point
		{Tx: 0x16B3747, Done: 99_999_999}, // the last ordinal of eight digits
		{Tx: 0x16B3748, Done: 1},          // the first commit that the stream can bring
		{Tx: 0x16B3748, Done: 2},
		{Tx: 0x16B3748, Done: 10},
		{Tx: 0x1_0000_0000, Done: 1},
		{Tx: 0xFFFF_FFFF_FFFF_FFFF, Done: 1},
	}
	last := ""
	for _, p := range ordered {
		got := position(uint64(p.Tx), p.Done)
		if got <= last {
			t.Errorf("%q does not sort after %q", got, last)
		}
		last = got
	}
	if got := position(0x16B374D848, 0); got != "00000016B374D848/00000000" {
		t.Errorf("got %q", got)
	}
}

func TestANumberIsAFloatOnlyIfNothingIsLost(t *testing.T) {
	for text, want := range map[string]any{
		"0": int64(0), "-0": int64(0), "0.0": 0.0, "0e5": 0.0, "1.0": 1.0, "100.00": 100.0, "1E+2": 100.0, "1e-2": 0.01,
		"0.001": 0.001, "123456.789": 123456.789, "1e23": 1e23, "-1.5": -1.5, "1e308": 1e308, "5e-324": 5e-324,
		"9007199254740993.0": "9007199254740993.0", "1.00000000000000000001": "1.00000000000000000001",
		"1e309": "1e309", "4e-324": "4e-324", "1e2147483648": "1e2147483648", "99999999999999999999": "99999999999999999999",
	} {
		if got := number(text); got != want {
			t.Errorf("number(%s) = %v (%T), want %v (%T)", text, got, got, want, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.Float64().Draw(t, "float")
		if math.IsInf(f, 0) || math.IsNaN(f) {
			return
		}
		text := strconv.FormatFloat(f, 'e', -1, 64)
		if got := number(text); got != f {
			t.Fatalf("number(%s) = %v (%T): its own shortest form is exact", text, got, got)
		}
	})
}

func TestRouteSharesThePayloadAndNothingElse(t *testing.T) {
	r, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	e := sampleEvent()
	m, err := r.Route(e)
	if err != nil {
		t.Fatal(err)
	}
	if &m.Body[0] != &e.Payload[0] {
		t.Error("the payload was copied")
	}
	clear(e.Headers)
	if m.Headers["note"] != "hello" {
		t.Errorf("a header changed with the event's bytes: %v", m.Headers["note"])
	}
}

func sampleEvent() *outbox.Event {
	return &outbox.Event{
		ID:            "0195a3a8-4f2b-7d1e-8c55-6f0f2d1f0a01",
		Aggregate:     outbox.Aggregate{Type: "order", ID: "4711", Version: 7, Versioned: true},
		Type:          "OrderPaid",
		SchemaVersion: "1",
		OccurredAt:    time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		CommittedAt:   time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC),
		Headers:       []byte(`{"note": "hello"}`),
		Payload:       []byte(`{"total": 12.50}`),
		ContentType:   "application/json",
		Origin:        outbox.OriginWAL,
		Table:         "public.outbox",
		Position:      offsets.Position{LSN: 1, Tx: 0x16B3748, Done: 1},
	}
}

func FuzzTemplate(f *testing.F) {
	for _, s := range []string{"outbox.event.{aggregate_type}", "{{{id}}}", "{partition:16}", "{column.region}", "{header.x}{", "}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, source string) {
		compiled, err := compile(source, []string{"region"})
		if err != nil {
			return
		}
		s, missing := compiled.render(sampleEvent(), nil)
		if missing != "" && s != "" {
			t.Errorf("%q gave %q although {%s} has no value", source, s, missing)
		}
		// A template without placeholders is its own text with the doubled braces halved.
		if strings.ContainsAny(source, "{}") {
			return
		}
		if s != source {
			t.Errorf("%q gave %q", source, s)
		}
	})
}

func FuzzHeaders(f *testing.F) {
	for _, s := range []string{`{"a":1}`, `{"a":null,"b":[1, 2 ] ,"c":{"d":1e5}}`, `{"a":"\ud800"}`, `null`, ` {} `, `[`, `{"traceparent":-0.0}`} {
		f.Add([]byte(s))
	}
	r, err := New(Config{RoutingKey: "{header.a}"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, headers []byte) {
		e := sampleEvent()
		e.Headers = headers
		m, err := r.Route(e)
		if err != nil {
			return
		}
		for name, v := range m.Headers {
			switch v := v.(type) {
			case string, int64, bool:
			case float64:
				if math.IsInf(v, 0) || math.IsNaN(v) {
					t.Errorf("header %q is %v", name, v)
				}
			default:
				t.Errorf("header %q is a %T", name, v)
			}
		}
		if m.Headers["cdcpub_position"] != "00000000016B3748/00000001" {
			t.Errorf("forged position %v", m.Headers["cdcpub_position"])
		}
	})
}

func BenchmarkRoute(b *testing.B) {
	r, err := New(Config{AppID: "orders"})
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct{ name, headers string }{
		{"without headers", ""},
		{"with three headers", `{"note": "hello", "attempt": 3, "price": 12.5}`},
	} {
		b.Run(c.name, func(b *testing.B) {
			e := sampleEvent()
			e.Headers = nil
			if c.headers != "" {
				e.Headers = []byte(c.headers)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := r.Route(e); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
