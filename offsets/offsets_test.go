package offsets_test

import (
	"encoding/json"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/cdcpub/cdcpub/offsets"
)

func TestParseLSNReadsWhatPostgreSQLPrints(t *testing.T) {
	cases := map[string]struct {
		in   string
		want offsets.LSN
	}{
		"no position":                         {"0/0", 0},
		"the first segment":                   {"0/16B3748", 0x16B3748},
		"both halves":                         {"16/B374D848", 0x16_B374D848},
		"a low half with its leading zeros":   {"1/00000001", 0x1_00000001},
		"lower case, which pg_lsn also takes": {"16/b374d848", 0x16_B374D848},
		"the last position":                   {"FFFFFFFF/FFFFFFFF", math.MaxUint64},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got, err := offsets.ParseLSN(c.in); err != nil || got != c.want {
				t.Errorf("ParseLSN(%q) = %v, %v, want %v", c.in, got, err, c.want)
			}
		})
	}
}

func TestParseLSNRefusesEverythingElse(t *testing.T) {
	cases := map[string]string{
		"nothing":                       "",
		"no slash":                      "16B3748",
		"a slash alone":                 "/",
		"no high half":                  "/16B3748",
		"no low half":                   "0/",
		"two slashes":                   "0/1/2",
		"a newline at the end":          "0/16B3748\n",
		"a space in front":              " 0/16B3748",
		"a space inside":                "0/ 16B3748",
		"trailing letters":              "0/16B3748xyz",
		"a high half above 32 bits":     "100000000/0",
		"a low half above 32 bits":      "0/100000000",
		"a high half of nine digits":    "000000001/0",
		"a low half of nine digits":     "0/000000001",
		"a plus":                        "+0/1",
		"a plus in the low half":        "0/+1",
		"a minus":                       "0/-1",
		"a prefix":                      "0x0/0x1",
		"digits with an underscore":     "0/1_0",
		"a letter past F":               "0/G",
		"digits of another script":      "0/\u0661",
		"a zero byte":                   "0/1\x00",
		"a decimal number in its place": "0/1.5",
	}
	for name, in := range cases {
		t.Run(name, func(t *testing.T) {
			if got, err := offsets.ParseLSN(in); err == nil {
				t.Errorf("ParseLSN(%q) = %v, want an error", in, got)
			}
		})
	}
}

func TestParseLSNErrorNamesTheInputAndTheWrongHalf(t *testing.T) {
	_, err := offsets.ParseLSN("0/16B3748x")
	want := `parse LSN "0/16B3748x": half "16B3748x": want 1 to 8 hexadecimal digits`
	if err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func TestLSNSurvivesItsTextForm(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := offsets.LSN(rapid.Uint64().Draw(t, "lsn"))
		if got, err := offsets.ParseLSN(want.String()); err != nil || got != want {
			t.Fatalf("ParseLSN(%q) = %v, %v", want, got, err)
		}
	})
}

func TestUnmarshalTextLeavesTheLSNAloneWhenItFails(t *testing.T) {
	lsn := offsets.LSN(7)
	if err := lsn.UnmarshalText([]byte("0/8 ")); err == nil || lsn != 7 {
		t.Errorf("lsn is %v, error %v, want 0/7 and an error", lsn, err)
	}
}

func FuzzParseLSN(f *testing.F) {
	for _, s := range []string{"0/0", "16/B374D848", "0/0000000A", "+0/1", "0/1 ", "100000000/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		lsn, err := offsets.ParseLSN(s)
		if err != nil {
			return
		}
		// What is accepted differs from the printed form in letter case and
		// leading zeros at most, so nothing was dropped or guessed.
		var hi, lo uint32
		if n, err := fmt.Sscanf(s, "%x/%x", &hi, &lo); n != 2 || err != nil || lsn != offsets.LSN(hi)<<32|offsets.LSN(lo) {
			t.Errorf("ParseLSN(%q) = %v, halves %X and %X, %v", s, lsn, hi, lo, err)
		}
		if len(s) > len("FFFFFFFF/FFFFFFFF") {
			t.Errorf("ParseLSN(%q) accepts %d bytes", s, len(s))
		}
	})
}

func TestPosition(t *testing.T) {
	row := offsets.Row{Table: "public.outbox", ID: "e12"}
	cases := map[string]struct {
		pos     offsets.Position
		text    string
		json    string
		zero    bool
		restart offsets.Position
	}{
		"none": {
			pos: offsets.Position{}, zero: true,
			text: "0/0",
			json: `{"lsn":"0/0"}`,
		},
		"between transactions": {
			pos:     offsets.Position{LSN: 0x16B3748},
			text:    "0/16B3748",
			json:    `{"lsn":"0/16B3748"}`,
			restart: offsets.Position{LSN: 0x16B3748},
		},
		"inside a transaction": {
			pos:     offsets.Position{LSN: 0x16B3748, Tx: 0x16B9000, Done: 12, Last: row},
			text:    "0/16B3748 + 12 of 0/16B9000",
			json:    `{"lsn":"0/16B3748","tx":"0/16B9000","done":12,"last":{"table":"public.outbox","id":"e12"}}`,
			restart: offsets.Position{LSN: 0x16B3748},
		},
		"inside the first transaction, before anything was acknowledged": {
			pos:  offsets.Position{Tx: 0x16B9000, Done: 1, Last: row},
			text: "0/0 + 1 of 0/16B9000",
			json: `{"lsn":"0/0","tx":"0/16B9000","done":1,"last":{"table":"public.outbox","id":"e12"}}`,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := c.pos.String(); got != c.text {
				t.Errorf("String() = %q, want %q", got, c.text)
			}
			if got := c.pos.IsZero(); got != c.zero {
				t.Errorf("IsZero() = %t, want %t", got, c.zero)
			}
			if got := c.pos.Restart(); got != c.restart {
				t.Errorf("Restart() = %v, want %v", got, c.restart)
			}
			b, err := json.Marshal(c.pos)
			if err != nil || string(b) != c.json {
				t.Errorf("JSON %s, %v, want %s", b, err, c.json)
			}
			var back offsets.Position
			if err := json.Unmarshal(b, &back); err != nil || back != c.pos {
				t.Errorf("back from JSON: %+v, %v, want %+v", back, err, c.pos)
			}
		})
	}
}

func TestPositionJSONRefusesADamagedLSN(t *testing.T) {
	for name, in := range map[string]string{
		"trailing characters": `{"lsn":"0/16B3748 "}`,
		"a number":            `{"lsn":23803720}`,
		"an empty string":     `{"lsn":""}`,
		"a negative count":    `{"lsn":"0/1","tx":"0/2","done":-1}`,
	} {
		t.Run(name, func(t *testing.T) {
			var pos offsets.Position
			if err := json.Unmarshal([]byte(in), &pos); err == nil {
				t.Errorf("%s was read as %v", in, pos)
			}
		})
	}
}

func TestCheckpointSurvivesJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawCheckpoint(t)
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatalf("marshal: %v", err)
		}
		var got offsets.Checkpoint
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("unmarshal %s: %v", b, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", b, diff)
		}
	})
}

// drawCheckpoint covers every field of a Checkpoint with any value, sensible or
// not: the text form must not depend on what the connector considers possible.
func drawCheckpoint(t *rapid.T) offsets.Checkpoint {
	lsn := func(name string) offsets.LSN { return offsets.LSN(rapid.Uint64().Draw(t, name)) }
	text := func(name string) string { return rapid.String().Draw(t, name) }
	cp := offsets.Checkpoint{
		Source: offsets.Source{
			SystemID: text("system id"), Timeline: rapid.Uint32().Draw(t, "timeline"),
			Database: text("database"), Slot: text("slot"),
			Publication: text("publication"), PublicationOID: rapid.Uint32().Draw(t, "publication oid"),
			Scope: text("scope"),
		},
		Epoch: rapid.Uint64().Draw(t, "epoch"),
		Phase: rapid.SampledFrom([]offsets.Phase{
			"", offsets.PhaseCreating, offsets.PhaseSnapshot, offsets.PhaseStreaming,
		}).Draw(t, "phase"),
		Pos: offsets.Position{
			LSN: lsn("lsn"), Tx: lsn("tx"), Done: rapid.Uint64().Draw(t, "done"),
			Last: offsets.Row{Table: text("last table"), ID: text("last id")},
		},
	}
	for range rapid.IntRange(0, 3).Draw(t, "tables") {
		cp.Source.Tables = append(cp.Source.Tables, offsets.Table{
			Name: text("table"), OID: rapid.Uint32().Draw(t, "oid"), PublicationRel: rapid.Uint32().Draw(t, "rel"),
		})
	}
	for range rapid.IntRange(0, 2).Draw(t, "holes") {
		cp.Holes = append(cp.Holes, offsets.Hole{
			Kind: text("kind"), Below: lsn("below"), Reason: text("reason"),
			Since: time.Unix(rapid.Int64Range(0, 4e9).Draw(t, "since"), 123456789).UTC(),
		})
	}
	return cp
}
