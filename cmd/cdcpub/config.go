package main

import (
	"strings"
	"time"

	"github.com/cdcpub/cdcpub/publish"
	"github.com/cdcpub/cdcpub/relay"
	"github.com/cdcpub/cdcpub/router"
	"github.com/cdcpub/cdcpub/snapshot"
)

// Config is the whole configuration of the command. Its yaml tags are the keys
// of cdcpub.yml; the other tags are what the loader and the table of keys
// (configKeys) need to know about one:
//
//	doc      one line for the documentation
//	enum     the values that a string may have
//	unbuilt  a value that is planned but not built, refused as such; "*" is any
//	secret   dsn or url: the value never appears in an error, and masked in cdcpub config
//
// A key that is not a field here is refused, so a field is added in the change
// that makes it work and never before.
type Config struct {
	Source   SourceConfig   `yaml:"source"`
	Snapshot SnapshotConfig `yaml:"snapshot"`
	Router   RouterConfig   `yaml:"router"`
	Relay    RelayConfig    `yaml:"relay"`
	Publish  PublishConfig  `yaml:"publish"`
	Offsets  OffsetsConfig  `yaml:"offsets"`
	Monitor  MonitorConfig  `yaml:"monitor"`
	Log      LogConfig      `yaml:"log"`
}

// SourceConfig says where the outbox is.
type SourceConfig struct {
	DSN          string        `yaml:"dsn" secret:"dsn" doc:"PostgreSQL connection string, as a URL or as key=value words; this or dsn_file is required"`
	DSNFile      string        `yaml:"dsn_file" doc:"file that holds the connection string; read again for every connection"`
	PasswordFile string        `yaml:"password_file" doc:"file that holds the password for a connection string without one; read again for every connection"`
	Slot         string        `yaml:"slot" doc:"logical replication slot; one per connector"`
	Publication  string        `yaml:"publication" doc:"publication that the slot streams"`
	Tables       []TableConfig `yaml:"tables" doc:"outbox tables"`
}

// TableConfig is one outbox table.
type TableConfig struct {
	Name    string        `yaml:"name" doc:"schema.name; a bare name is in schema public"`
	Columns ColumnsConfig `yaml:"columns"`
}

// ColumnsConfig names a table's columns where they differ from the default. An
// empty name is the default; an optional column is then used only if the table
// has it, one that is named here must exist, and "-" (outbox.Unmapped) leaves it
// alone although the table has it.
type ColumnsConfig struct {
	ID            string   `yaml:"id" doc:"event ID; empty is id"`
	AggregateType string   `yaml:"aggregate_type" doc:"empty is aggregatetype"`
	AggregateID   string   `yaml:"aggregate_id" doc:"empty is aggregateid"`
	Type          string   `yaml:"type" doc:"event type; empty is type"`
	Payload       string   `yaml:"payload" doc:"message body; empty is payload"`
	Version       string   `yaml:"version" doc:"aggregate version; empty is version, if there is one"`
	SchemaVersion string   `yaml:"schema_version" doc:"empty is schema_version, if there is one"`
	Kind          string   `yaml:"kind" doc:"delta, snapshot or tombstone; empty is kind, if there is one"`
	OccurredAt    string   `yaml:"occurred_at" doc:"empty is occurred_at or else created_at, if there is one"`
	Tenant        string   `yaml:"tenant" doc:"empty is tenant, if there is one"`
	Headers       string   `yaml:"headers" doc:"JSON object of further message headers; empty is headers, if there is one"`
	TraceParent   string   `yaml:"traceparent" doc:"W3C trace context; empty is traceparent, if there is one"`
	TraceState    string   `yaml:"tracestate" doc:"empty is tracestate, if there is one"`
	Extra         []string `yaml:"extra" doc:"further columns, for {column.NAME} in templates"`
}

// SnapshotConfig says what happens to rows older than the slot.
type SnapshotConfig struct {
	Mode      string   `yaml:"mode" enum:"initial,never" doc:"initial publishes the rows that are older than the slot, never leaves them out"`
	OrderBy   []string `yaml:"order_by" doc:"columns that give old rows their order; empty is the version column, then the event ID"`
	ChunkRows int      `yaml:"chunk_rows" doc:"rows fetched from the server's cursor at once"`
}

// RouterConfig makes a message out of an event. The templates are specified in
// docs/message-format.md.
type RouterConfig struct {
	Exchange   string            `yaml:"exchange" doc:"template of the exchange name"`
	RoutingKey string            `yaml:"routing_key" doc:"template of the routing key"`
	MessageID  string            `yaml:"message_id" doc:"template of the message_id property"`
	Headers    map[string]string `yaml:"headers" doc:"further headers: name to template"`
	AppID      string            `yaml:"app_id" doc:"app_id property; empty leaves it out"`
	Format     string            `yaml:"format" enum:"plain" unbuilt:"*" doc:"plain sends the payload's bytes as they are"`
}

// RelayConfig limits what is under way and says what a failed event means.
type RelayConfig struct {
	Window          int           `yaml:"window" doc:"unsettled messages at most"`
	WindowBytes     ByteSize      `yaml:"window_bytes" doc:"bytes of events held in memory at most"`
	Span            int           `yaml:"span" doc:"events from the oldest unfinished one to the newest read, at most"`
	Ordering        string        `yaml:"ordering" enum:"pipelined,strict" doc:"strict has one unsettled message per aggregate"`
	OnUnroutable    string        `yaml:"on_unroutable" enum:"retry,stop" unbuilt:"park" doc:"what a returned message means"`
	OnNack          string        `yaml:"on_nack" enum:"retry,stop" unbuilt:"park" doc:"what a nacked message means"`
	OnInvalid       string        `yaml:"on_invalid" enum:"stop" unbuilt:"park" doc:"what an event means that cannot be published at all"`
	ShutdownTimeout time.Duration `yaml:"shutdown_timeout" doc:"time for outstanding confirms after SIGTERM"`
}

// PublishConfig is about the broker.
type PublishConfig struct {
	URLs            []string      `yaml:"urls" secret:"url" doc:"broker URLs (amqp or amqps), tried in random order; these or urls_file are required"`
	URLsFile        string        `yaml:"urls_file" doc:"file that holds broker URLs, one on each line; read again for every connection"`
	PasswordFile    string        `yaml:"password_file" doc:"file that holds the password for broker URLs without one; read again for every connection"`
	Lanes           int           `yaml:"lanes" doc:"channels that publish in parallel; an aggregate always uses the same one"`
	Mandatory       bool          `yaml:"mandatory" doc:"have the broker return what no queue takes"`
	Declare         bool          `yaml:"declare" doc:"declare missing exchanges as durable topic exchanges"`
	ConfirmTimeout  time.Duration `yaml:"confirm_timeout" doc:"age of the oldest unconfirmed message at which the connection is given up"`
	MaxMessageBytes ByteSize      `yaml:"max_message_bytes" doc:"largest body that is sent"`
}

// OffsetsConfig is about the connector's durable state.
type OffsetsConfig struct {
	Store    string        `yaml:"store" enum:"file" unbuilt:"postgres" doc:"where the position is kept"`
	Path     string        `yaml:"path" doc:"directory of the file store"`
	Interval time.Duration `yaml:"interval" doc:"time between two saves while events flow, at most"`
	Every    int           `yaml:"every" doc:"events between two saves, at most"`
}

// MonitorConfig is about the HTTP server.
type MonitorConfig struct {
	Listen string `yaml:"listen" doc:"address of metrics, health and status, or off"`
}

// LogConfig is about the log on standard error.
type LogConfig struct {
	Level  string `yaml:"level" enum:"trace,debug,info,warn,error" doc:"least severe level that is written"`
	Format string `yaml:"format" enum:"text,json" doc:"text for people, json for collectors"`
}

// monitorOff is the value of monitor.listen that starts no server.
const monitorOff = "off"

// NewConfig returns the defaults. Only where PostgreSQL and the broker are has none.
func NewConfig() Config {
	return Config{
		Source: SourceConfig{
			Slot:        "cdcpub",
			Publication: "cdcpub",
			Tables:      []TableConfig{{Name: "public.outbox"}},
		},
		Snapshot: SnapshotConfig{Mode: "initial", ChunkRows: snapshot.DefaultChunkRows},
		Router: RouterConfig{
			Exchange:   router.DefaultExchange,
			RoutingKey: router.DefaultRoutingKey,
			MessageID:  router.DefaultMessageID,
			AppID:      "cdcpub",
			Format:     "plain",
		},
		Relay: RelayConfig{
			Window:          relay.DefaultWindow,
			WindowBytes:     relay.DefaultWindowBytes,
			Span:            relay.DefaultSpan,
			Ordering:        "pipelined",
			OnUnroutable:    "retry",
			OnNack:          "retry",
			OnInvalid:       "stop",
			ShutdownTimeout: relay.DefaultShutdownTimeout,
		},
		Publish: PublishConfig{
			Lanes:           publish.DefaultLanes,
			Mandatory:       true,
			ConfirmTimeout:  publish.DefaultConfirmTimeout,
			MaxMessageBytes: publish.DefaultMaxMessageBytes,
		},
		Offsets: OffsetsConfig{Store: "file", Path: "./cdcpub-state", Interval: relay.DefaultInterval, Every: relay.DefaultEvery},
		Monitor: MonitorConfig{Listen: "127.0.0.1:7690"},
		Log:     LogConfig{Level: "info", Format: "text"},
	}
}

// unbuiltKeys lists the keys that are planned and not built yet, some with keys
// below them. They get a message of their own: "unknown" would send its reader
// looking for a typing error.
func unbuiltKeys() []string {
	return []string{
		"source.messages", "snapshot.where", "router.rules", "relay.rate", "publish.tls",
		"offsets.dsn", "offsets.schema", "cleanup", "monitor.token_file",
	}
}

// notBuilt reports whether path, or a key above it, is not built yet.
func notBuilt(path string) (key string, ok bool) {
	for _, key := range unbuiltKeys() {
		if path == key || strings.HasPrefix(path, key+".") {
			return key, true
		}
	}
	return path, false
}
