package router

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the expected half of testdata/*.txt")

// goldenInput is the upper half of a case file. Payload and headers are either
// JSON, taken byte for byte as it stands in the file, or any text.
type goldenInput struct {
	Config Config
	Event  struct {
		Table, ID, Type, Tenant, AggregateType, AggregateID string
		Version                                             *int64
		SchemaVersion, Kind, Origin, Position, ContentType  string
		OccurredAt, CommittedAt                             time.Time
		TraceParent, TraceState                             string
		Headers, Payload                                    json.RawMessage
		HeadersText, PayloadText                            *string
		Fields                                              []outbox.Field
		Done                                                uint64
		Malformed                                           string
	}
}

func (in *goldenInput) event(t *testing.T) *outbox.Event {
	t.Helper()
	g := &in.Event
	e := &outbox.Event{
		ID:            g.ID,
		Aggregate:     outbox.Aggregate{Tenant: g.Tenant, Type: g.AggregateType, ID: g.AggregateID},
		Type:          g.Type,
		SchemaVersion: g.SchemaVersion,
		Kind:          outbox.Kind(g.Kind),
		OccurredAt:    g.OccurredAt,
		CommittedAt:   g.CommittedAt,
		Headers:       g.Headers,
		Payload:       g.Payload,
		ContentType:   g.ContentType,
		TraceParent:   g.TraceParent,
		TraceState:    g.TraceState,
		Fields:        g.Fields,
		Origin:        outbox.Origin(g.Origin),
		Table:         g.Table,
	}
	if g.Version != nil {
		e.Aggregate.Version, e.Aggregate.Versioned = *g.Version, true
	}
	if g.HeadersText != nil {
		e.Headers = []byte(*g.HeadersText)
	}
	if g.PayloadText != nil {
		e.Payload = []byte(*g.PayloadText)
	}
	if g.Position != "" {
		tx, err := offsets.ParseLSN(g.Position)
		if err != nil {
			t.Fatal(err)
		}
		e.Position = offsets.Position{Tx: tx, Done: g.Done}
	}
	if g.Malformed != "" {
		e.Malformed = errors.New(g.Malformed)
	}
	return e
}

func render(m Message, err error) string {
	var b strings.Builder
	if err != nil {
		fmt.Fprintf(&b, "error: %v\n", err)
		return b.String()
	}
	fmt.Fprintf(&b, "exchange: %s\nrouting_key: %s\nmessage_id: %s\ntype: %s\n", m.Exchange, m.RoutingKey, m.ID, m.Type)
	fmt.Fprintf(&b, "app_id: %s\ncontent_type: %s\n", m.AppID, m.ContentType)
	if !m.Timestamp.IsZero() {
		fmt.Fprintf(&b, "timestamp: %s\n", m.Timestamp.Format(time.RFC3339Nano))
	}
	fmt.Fprintf(&b, "order_key: %q\nheaders:\n", m.OrderKey)
	for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
		fmt.Fprintf(&b, "  %s (%T): %v\n", name, m.Headers[name], m.Headers[name])
	}
	if m.Body == nil {
		b.WriteString("no body\n")
	} else {
		fmt.Fprintf(&b, "body: %s\n", m.Body)
	}
	return strings.ReplaceAll(b.String(), ": \n", ":\n")
}

func TestGolden(t *testing.T) {
	const separator = "----------\n"
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no case files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, _ := strings.Cut(string(content), separator)
			var in goldenInput
			dec := json.NewDecoder(strings.NewReader(input))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&in); err != nil {
				t.Fatal(err)
			}
			r, err := New(in.Config)
			if err != nil {
				t.Fatal(err)
			}
			got := render(r.Route(in.event(t)))
			if *update {
				if err := os.WriteFile(file, []byte(input+separator+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
