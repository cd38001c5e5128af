package publish

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/router"
)

func TestValidate(t *testing.T) {
	long := strings.Repeat("x", 256)
	fits := strings.Repeat("x", 255)
	header := func(key string, value any) func(*router.Message) {
		return func(m *router.Message) { m.Headers = map[string]any{key: value} }
	}
	for _, c := range []struct {
		name string
		edit func(*router.Message)
		want string // empty: valid
	}{
		{"an ordinary message", func(*router.Message) {}, ""},
		{"short strings of 255 bytes", func(m *router.Message) {
			m.Exchange, m.RoutingKey, m.ID, m.Type, m.AppID, m.ContentType = fits, fits, fits, fits, fits, fits
		}, ""},
		{"all header types", func(m *router.Message) {
			m.Headers = map[string]any{"s": "", "i": int64(math.MinInt64), "f": 1.5, "b": true, fits: long}
		}, ""},
		{"an empty body", func(m *router.Message) { m.Body = nil }, ""},
		{"a body of the largest size", func(m *router.Message) { m.Body = make([]byte, 1000) }, ""},
		{"a larger body", func(m *router.Message) { m.Body = make([]byte, 1001) }, "body is 1001 bytes: the limit is 1000"},
		{"no message_id", func(m *router.Message) { m.ID = "" }, "message_id is empty: returns could not be told apart"},
		{"long exchange", func(m *router.Message) { m.Exchange = long }, "exchange is 256 bytes: AMQP allows 255"},
		{"long routing key", func(m *router.Message) { m.RoutingKey = long }, "routing key is 256 bytes: AMQP allows 255"},
		{"long message_id", func(m *router.Message) { m.ID = long }, "message_id is 256 bytes: AMQP allows 255"},
		{"long type", func(m *router.Message) { m.Type = long }, "type is 256 bytes: AMQP allows 255"},
		{"long app_id", func(m *router.Message) { m.AppID = long }, "app_id is 256 bytes: AMQP allows 255"},
		{"long content_type", func(m *router.Message) { m.ContentType = long }, "content_type is 256 bytes: AMQP allows 255"},
		{"long header name", header(long, ""), `header name "` + long[:40] + `"... is 256 bytes: AMQP allows 255`},
		{"a NUL in the exchange", func(m *router.Message) { m.Exchange = "a\x00b" }, "exchange contains a NUL byte"},
		{"a NUL in the routing key", func(m *router.Message) { m.RoutingKey = "a\x00b" }, "routing key contains a NUL byte"},
		{"an int, which AMQP would cut", header("n", 1<<40), `header "n" has type int: want string, int64, float64 or bool`},
		{"a nested header", header("n", map[string]any{}), `header "n" has type map[string]interface {}: want string, int64, float64 or bool`},
		{"a null header", header("n", nil), `header "n" has type <nil>: want string, int64, float64 or bool`},
		{"headers above a frame", header("n", strings.Repeat("x", frameMax)), "properties and headers are 131098 bytes: one AMQP frame holds 131008"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := router.Message{RoutingKey: "key", ID: "id", Body: []byte("body"), Timestamp: time.Now()}
			c.edit(&m)
			got := ""
			if err := validate(&m, 1000); err != nil {
				got = err.Error()
			}
			if got != c.want {
				t.Errorf("error %q, want %q", got, c.want)
			}
		})
	}
}

// The limit is a little below what the protocol allows, never above.
func TestTheLargestValidHeadersReachARealBroker(t *testing.T) {
	queue := rabbittest.Name(t)
	url := rabbittest.URL(t)
	rabbittest.Queue(t, url, queue, "", "", nil)
	r := newRig(t, Config{URLs: []string{url}, Mandatory: true}, single)
	m := router.Message{RoutingKey: queue, ID: "id", Headers: map[string]any{"h": "", "i": int64(1), "f": 1.5, "b": true}}
	m.Headers["h"] = strings.Repeat("x", maxProperties-propertiesSize(&m))
	larger := router.Message{RoutingKey: queue, ID: "id", Headers: map[string]any{"h": m.Headers["h"].(string) + strings.Repeat("x", 30)}}
	r.publish(m, larger)
	r.wantKinds(confirmed, refused)
	if s := r.p.Stats(); s.ConnectionsLost != 0 {
		t.Errorf("stats %+v", s)
	}
}
