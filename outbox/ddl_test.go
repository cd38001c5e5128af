package outbox

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite testdata/outbox.sql")

func TestDDL(t *testing.T) {
	const file = "testdata/outbox.sql"
	got := DDL("public", "outbox") + ";\n"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestParseTable(t *testing.T) {
	long := strings.Repeat("a", maxIdentifier)
	for input, want := range map[string][2]string{
		"outbox":                 {"public", "outbox"},
		"orders.outbox":          {"orders", "outbox"},
		"Orders.OutBox":          {"orders", "outbox"},
		`"Orders"."OutBox"`:      {"Orders", "OutBox"},
		`orders."OutBox"`:        {"orders", "OutBox"},
		`"my.schema".t1`:         {"my.schema", "t1"},
		`"a""b"."c d"`:           {`a"b`, "c d"},
		`"t-1"`:                  {"public", "t-1"},
		"_a$1.größe":             {"_a$1", "größe"},
		long + "." + long:        {long, long},
		`"` + long + `"`:         {"public", long},
		`"".x`:                   {}, // the rest are refused
		"":                       {},
		".":                      {},
		"a.":                     {},
		".a":                     {},
		"a.b.c":                  {},
		"1a":                     {},
		"$a":                     {},
		"a b":                    {},
		"my-table":               {},
		`"a`:                     {},
		`"a"b`:                   {},
		`a"b"`:                   {},
		"a.b;drop table x":       {},
		" a":                     {},
		"a\x00b":                 {},
		"\"a\x00b\"":             {},
		long + "a":               {},
		`public."` + long + `é"`: {},
	} {
		schema, name, err := ParseTable(input)
		if refuse := want == [2]string{}; (err != nil) != refuse || schema != want[0] || name != want[1] {
			t.Errorf("ParseTable(%q) = %q, %q, %v, want %q", input, schema, name, err, want)
		}
	}
}

func FuzzParseTable(f *testing.F) {
	for _, s := range []string{"a.b", `"a""b".c`, `"`, "A$.b1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		schema, name, err := ParseTable(s)
		if err != nil {
			return
		}
		// Whatever is accepted, its quoted form means the same.
		again, againName, err := ParseTable(QuoteTable(schema, name))
		if err != nil || again != schema || againName != name {
			t.Errorf("%q is %q.%q, quoted %q.%q (%v)", s, schema, name, again, againName, err)
		}
	})
}
