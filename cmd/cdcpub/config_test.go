package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const (
	testDSN = "postgres://app:pw@127.0.0.1:5432/shop"
	testURL = "amqp://app:pw@127.0.0.1:5672/"
)

// requiredEnv sets the two keys that have no default.
func requiredEnv(more ...string) []string {
	return append([]string{"HOME=/nowhere", "CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_PUBLISH_URL=" + testURL}, more...)
}

// requiredConfig is what requiredEnv alone gives.
func requiredConfig() Config {
	cfg := NewConfig()
	cfg.Source.DSN = testDSN
	cfg.Publish.URLs = []string{testURL}
	return cfg
}

// load loads text as cdcpub.yml from a working directory of its own.
func load(t *testing.T, text string, environ []string) (Config, error) {
	t.Helper()
	t.Chdir(t.TempDir())
	if err := os.WriteFile("cdcpub.yml", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return LoadConfig("", environ)
}

func wantConfig(t *testing.T, got Config, err error, want Config) {
	t.Helper()
	if err != nil {
		t.Fatalf("load: %v", err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("configuration differs (-want +got):\n%s", diff)
	}
}

// wantProblems checks the whole text of a ConfigError.
func wantProblems(t *testing.T, err error, want ...string) {
	t.Helper()
	var ce *ConfigError
	if !errors.As(err, &ce) {
		t.Fatalf("error is %v (%T), want a ConfigError", err, err)
	}
	if diff := cmp.Diff(want, strings.Split(ce.Error(), "\n")); diff != "" {
		t.Errorf("problems differ (-want +got):\n%s", diff)
	}
}

func TestLoadConfig(t *testing.T) {
	tests := []struct {
		name string
		file string
		env  []string
		want func(*Config)
	}{
		{
			name: "an empty file leaves the defaults",
			want: func(*Config) {},
		},
		{
			name: "a file of comments leaves the defaults",
			file: "# nothing here\n",
			want: func(*Config) {},
		},
		{
			name: "the file replaces defaults key by key",
			file: "relay: {window: 10, window_bytes: 64MiB, shutdown_timeout: 1m30s}\npublish: {mandatory: false}\n",
			want: func(c *Config) {
				c.Relay.Window, c.Relay.WindowBytes, c.Relay.ShutdownTimeout = 10, 64<<20, 90*time.Second
				c.Publish.Mandatory = false
			},
		},
		{
			name: "a list of tables replaces the default table",
			file: "source:\n  tables:\n    - name: sales.outbox\n      columns: {id: event_id, extra: [region, shard]}\n    - {name: billing.outbox}\n",
			want: func(c *Config) {
				c.Source.Tables = []TableConfig{
					{Name: "sales.outbox", Columns: ColumnsConfig{ID: "event_id", Extra: []string{"region", "shard"}}},
					{Name: "billing.outbox"},
				}
			},
		},
		{
			name: "the environment beats the file",
			file: "relay: {window: 10}\nlog: {level: debug}\n",
			env:  []string{"CDCPUB_RELAY_WINDOW=20"},
			want: func(c *Config) { c.Relay.Window, c.Log.Level = 20, "debug" },
		},
		{
			name: "the environment beats a value that the file has wrong",
			file: "relay:\n  window: many\nsnapshot: {order_by: [1, 2]}\n",
			env:  []string{"CDCPUB_RELAY_WINDOW=20", "CDCPUB_SNAPSHOT_ORDER_BY=[id]"},
			want: func(c *Config) { c.Relay.Window, c.Snapshot.OrderBy = 20, []string{"id"} },
		},
		{
			name: "underscores in keys do not mislead the environment",
			env:  []string{"CDCPUB_RELAY_WINDOW_BYTES=16MiB", "CDCPUB_PUBLISH_CONFIRM_TIMEOUT=5m", "CDCPUB_ROUTER_APP_ID=orders"},
			want: func(c *Config) {
				c.Relay.WindowBytes, c.Publish.ConfirmTimeout, c.Router.AppID = 16<<20, 5*time.Minute, "orders"
			},
		},
		{
			name: "lists and mappings in the environment are YAML flow",
			env: []string{
				"CDCPUB_SNAPSHOT_ORDER_BY=[created_at, id]", "CDCPUB_ROUTER_HEADERS={region: '{column.region}'}",
				"CDCPUB_SOURCE_TABLES=[{name: a.b, columns: {extra: [region]}}]",
			},
			want: func(c *Config) {
				c.Snapshot.OrderBy = []string{"created_at", "id"}
				c.Router.Headers = map[string]string{"region": "{column.region}"}
				c.Source.Tables = []TableConfig{{Name: "a.b", Columns: ColumnsConfig{Extra: []string{"region"}}}}
			},
		},
		{
			name: "a string in the environment is taken as it is",
			env:  []string{"CDCPUB_OFFSETS_PATH={not: yaml} # nor a comment", "CDCPUB_SOURCE_SLOT=123"},
			want: func(c *Config) { c.Offsets.Path, c.Source.Slot = "{not: yaml} # nor a comment", "123" },
		},
		{
			name: "an empty variable is an empty string",
			env:  []string{"CDCPUB_ROUTER_APP_ID="},
			want: func(c *Config) { c.Router.AppID = "" },
		},
		{
			name: "one broker in the environment replaces the file's list",
			file: "publish: {urls: ['http://a', 'http://b']}\n",
			want: func(*Config) {},
		},
		{
			name: "the last of two equal variables counts",
			env:  []string{"CDCPUB_RELAY_SPAN=60000", "CDCPUB_RELAY_SPAN=70000"},
			want: func(c *Config) { c.Relay.Span = 70000 },
		},
		{
			name: "variables of Kubernetes and of tests are not ours",
			env: []string{
				"CDCPUB_SERVICE_HOST=10.0.0.1", "CDCPUB_SERVICE_PORT=7690", "CDCPUB_SERVICE_PORT_HTTP=7690",
				"CDCPUB_PORT=tcp://10.0.0.1:7690", "CDCPUB_PORT_7690_TCP_ADDR=10.0.0.1", "CDCPUB_TEST_POSTGRES=x",
			},
			want: func(*Config) {},
		},
		{
			name: "the monitor can be off",
			file: "monitor: {listen: off}\n",
			want: func(c *Config) { c.Monitor.Listen = "off" },
		},
		{
			name: "an anchor may be used twice",
			file: "source:\n  tables:\n    - {name: a.b, columns: &c {id: event_id}}\n    - {name: c.d, columns: *c}\n",
			want: func(c *Config) {
				cols := ColumnsConfig{ID: "event_id"}
				c.Source.Tables = []TableConfig{{Name: "a.b", Columns: cols}, {Name: "c.d", Columns: cols}}
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := load(t, tt.file, requiredEnv(tt.env...))
			want := requiredConfig()
			tt.want(&want)
			wantConfig(t, got, err, want)
		})
	}
}

func TestWithoutDefaultFile(t *testing.T) {
	t.Chdir(t.TempDir())
	got, err := LoadConfig("", requiredEnv())
	wantConfig(t, got, err, requiredConfig())
}

func TestNamedFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "other.yml")
	if err := os.WriteFile(file, []byte("log: {level: warn}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := LoadConfig(file, requiredEnv())
	want := requiredConfig()
	want.Log.Level = "warn"
	wantConfig(t, got, err, want)

	_, err = LoadConfig(file+".missing", requiredEnv())
	wantProblems(t, err, "read configuration: open "+file+".missing: no such file or directory")
}

func TestLoadConfigRefuses(t *testing.T) {
	tests := []struct {
		name string
		file string
		env  []string
		want []string
	}{
		{
			name: "an unknown key with the nearest beside it",
			file: "relay:\n  windw: 10\n",
			want: []string{"cdcpub.yml:2: unknown key relay.windw; did you mean relay.window?"},
		},
		{
			name: "a key at the wrong level with its right place",
			file: "window_bytes: 64MiB\n",
			want: []string{"cdcpub.yml:1: unknown key window_bytes; did you mean relay.window_bytes?"},
		},
		{
			name: "a key unlike any with the keys that are known there",
			file: "log: {destination: stderr}\n",
			want: []string{"cdcpub.yml:1: unknown key log.destination; known here: level, format"},
		},
		{
			name: "an unknown key inside a list",
			file: "source:\n  tables:\n    - name: a.b\n      columns:\n        aggregat_id: x\n",
			want: []string{"cdcpub.yml:5: unknown key source.tables[0].columns.aggregat_id; did you mean source.tables[0].columns.aggregate_id?"},
		},
		{
			name: "a key that is set twice",
			file: "log:\n  level: info\n  level: debug\nlog: {}\n",
			want: []string{"cdcpub.yml:4: log: set twice; first on line 1", "cdcpub.yml:3: log.level: set twice; first on line 2"},
		},
		{
			name: "wrong types with what was expected",
			file: `
source: {slot: 123, tables: {name: a.b}}
snapshot: {chunk_rows: "5000", order_by: id}
router: {headers: [a], app_id: }
relay: {window: 2_048, window_bytes: 32MB, shutdown_timeout: 8}
publish: {mandatory: "true", lanes: 1.5}
log: text
`,
			want: []string{
				"cdcpub.yml:2: source.slot: expected a string, got \"123\", which YAML reads as int",
				"cdcpub.yml:2: source.tables: expected a list of mappings, got a mapping",
				"cdcpub.yml:3: snapshot.chunk_rows: expected a whole number, got \"5000\"",
				"cdcpub.yml:3: snapshot.order_by: expected a list of strings, got \"id\"",
				"cdcpub.yml:4: router.headers: expected a mapping of names to strings, got a list",
				"cdcpub.yml:4: router.app_id: expected a string, got nothing; leave the key out for its default",
				"cdcpub.yml:5: relay.window: expected a whole number, got \"2_048\", which YAML reads as int",
				"cdcpub.yml:5: relay.window_bytes: expected a size such as 32MiB, got \"32MB\"",
				"cdcpub.yml:5: relay.shutdown_timeout: expected a duration such as 60s, got \"8\", which YAML reads as int",
				"cdcpub.yml:6: publish.mandatory: expected true or false, got \"true\"",
				"cdcpub.yml:6: publish.lanes: expected a whole number, got \"1.5\", which YAML reads as float",
				"cdcpub.yml:7: log: expected a mapping, got \"text\"",
			},
		},
		{
			name: "wrong types inside lists and mappings",
			file: "source:\n  tables: [a.b, {name: [x]}]\nrouter:\n  headers: {n: 5}\n",
			want: []string{
				"cdcpub.yml:2: source.tables[0]: expected a mapping, got \"a.b\"",
				"cdcpub.yml:2: source.tables[1].name: expected a string, got a list",
				"cdcpub.yml:4: router.headers.n: expected a string, got \"5\", which YAML reads as int",
			},
		},
		{
			name: "values that a key does not have",
			file: "snapshot: {mode: always}\nrelay: {on_nack: ignore}\nlog: {format: xml}\n",
			want: []string{
				"cdcpub.yml:1: snapshot.mode: expected initial or never, got \"always\"",
				"cdcpub.yml:2: relay.on_nack: expected retry or stop, got \"ignore\"",
				"cdcpub.yml:3: log.format: expected text or json, got \"xml\"",
			},
		},
		{
			name: "what is not built yet, by its name",
			file: `
source: {messages: {prefix: x}}
snapshot: {where: "id > 5"}
router: {rules: [], format: cloudevents}
relay: {rate: 100, on_unroutable: park, on_nack: park, on_invalid: park}
publish: {tls: {ca: x}}
offsets: {store: postgres, dsn: x, schema: cdcpub}
cleanup: {enabled: false}
monitor: {token_file: x}
`,
			want: []string{
				"cdcpub.yml:2: source.messages is not built yet",
				"cdcpub.yml:3: snapshot.where is not built yet",
				"cdcpub.yml:4: router.rules is not built yet",
				"cdcpub.yml:4: router.format: \"cloudevents\" is not built yet; possible is plain",
				"cdcpub.yml:5: relay.rate is not built yet",
				"cdcpub.yml:5: relay.on_unroutable: \"park\" is not built yet; possible is retry or stop",
				"cdcpub.yml:5: relay.on_nack: \"park\" is not built yet; possible is retry or stop",
				"cdcpub.yml:5: relay.on_invalid: \"park\" is not built yet; possible is stop",
				"cdcpub.yml:6: publish.tls is not built yet",
				"cdcpub.yml:7: offsets.store: \"postgres\" is not built yet; possible is file",
				"cdcpub.yml:7: offsets.dsn is not built yet",
				"cdcpub.yml:7: offsets.schema is not built yet",
				"cdcpub.yml:8: cleanup is not built yet",
				"cdcpub.yml:9: monitor.token_file is not built yet",
			},
		},
		{
			name: "variables that are not built yet",
			env: []string{
				"CDCPUB_CLEANUP_ENABLED=true", "CDCPUB_PUBLISH_TLS_CA=x",
				"CDCPUB_RELAY_ON_NACK=park",
			},
			want: []string{
				"CDCPUB_CLEANUP_ENABLED: cleanup is not built yet",
				"CDCPUB_PUBLISH_TLS_CA: publish.tls is not built yet",
				"CDCPUB_RELAY_ON_NACK: relay.on_nack: \"park\" is not built yet; possible is retry or stop",
			},
		},
		{
			name: "unknown variables with the nearest name",
			env:  []string{"CDCPUB_RELAY_WINDOWS=10", "CDCPUB_PUBLISH_URI=x", "CDCPUB_WHATEVER_IT_TAKES=1", "CDCPUB_METRICS_SERVICE_HOST=10.0.0.1"},
			want: []string{
				"CDCPUB_METRICS_SERVICE_HOST: unknown variable; if Kubernetes made it for a Service, set enableServiceLinks: false in the pod",
				"CDCPUB_PUBLISH_URI: unknown variable; did you mean CDCPUB_PUBLISH_URL?",
				"CDCPUB_RELAY_WINDOWS: unknown variable; did you mean CDCPUB_RELAY_WINDOW?",
				"CDCPUB_WHATEVER_IT_TAKES: unknown variable; variables are named after keys, as CDCPUB_SOURCE_DSN is after source.dsn",
			},
		},
		{
			name: "variables of the wrong type",
			env:  []string{"CDCPUB_RELAY_WINDOW=many", "CDCPUB_PUBLISH_MANDATORY=", "CDCPUB_SNAPSHOT_ORDER_BY=id", "CDCPUB_ROUTER_HEADERS={"},
			want: []string{
				"CDCPUB_PUBLISH_MANDATORY: publish.mandatory: expected true or false, got \"\"",
				"CDCPUB_RELAY_WINDOW: relay.window: expected a whole number, got \"many\"",
				"CDCPUB_ROUTER_HEADERS: router.headers: expected a mapping of names to strings, got \"{\"",
				"CDCPUB_SNAPSHOT_ORDER_BY: snapshot.order_by: expected a list of strings, got \"id\"",
			},
		},
		{
			name: "two variables for the brokers",
			env:  []string{"CDCPUB_PUBLISH_URLS=[amqp://a]"},
			want: []string{"CDCPUB_PUBLISH_URL: CDCPUB_PUBLISH_URLS is set too; set one of the two"},
		},
		{
			name: "rules between keys, with the place that set one of them",
			file: "relay:\n  window: 1000\n  span: 500\npublish:\n  max_message_bytes: 64MiB\n",
			want: []string{
				"cdcpub.yml:3: relay.span: 500 is less than relay.window 1000: the span must hold a full window",
				"cdcpub.yml:5: relay.window_bytes: 32MiB is less than publish.max_message_bytes 64MiB: the window must hold the largest message",
			},
		},
		{
			name: "values out of range",
			file: `
source: {slot: My-Slot, publication: "", tables: []}
snapshot: {chunk_rows: 0, order_by: [id, ""]}
relay: {window: 0, shutdown_timeout: -1s}
publish: {lanes: -1, confirm_timeout: 0s, max_message_bytes: 0}
offsets: {path: "", interval: 0s, every: 0}
monitor: {listen: "7690"}
`,
			want: []string{
				"cdcpub.yml:2: source.slot: \"My-Slot\" is not a slot name: want 1 to 63 of a-z, 0-9 and _",
				"cdcpub.yml:2: source.publication: \"\" is not a publication name: want 1 to 63 bytes",
				"cdcpub.yml:2: source.tables: is empty: name at least one table",
				"cdcpub.yml:3: snapshot.chunk_rows: 0 is less than 1",
				"cdcpub.yml:3: snapshot.order_by[1]: is an empty column name",
				"cdcpub.yml:4: relay.window: 0 is less than 1",
				"cdcpub.yml:4: relay.shutdown_timeout: must be more than zero",
				"cdcpub.yml:5: publish.lanes: -1 is less than 1",
				"cdcpub.yml:5: publish.confirm_timeout: must be more than zero",
				"cdcpub.yml:5: publish.max_message_bytes: must be more than zero",
				"cdcpub.yml:6: offsets.path: is not set",
				"cdcpub.yml:6: offsets.interval: must be more than zero",
				"cdcpub.yml:6: offsets.every: 0 is less than 1",
				"cdcpub.yml:7: monitor.listen: \"7690\" is not an address: want HOST:PORT, :PORT or off",
			},
		},
		{
			name: "limits that do not hold a batch",
			file: "relay: {window: 100, span: 255, window_bytes: 1023KiB}\npublish: {max_message_bytes: 64KiB}\n",
			want: []string{
				"cdcpub.yml:1: relay.span: 255 is less than a batch, 256 events",
				"cdcpub.yml:1: relay.window_bytes: 1023KiB is less than a batch, 1MiB",
			},
		},
		{
			name: "tables without a name, named twice or by no name",
			file: "source:\n  tables:\n    - {}\n    - name: outbox\n    - name: Public.\"outbox\"\n    - name: a-b\n",
			want: []string{
				"cdcpub.yml:3: source.tables[0].name: is not set",
				`cdcpub.yml:5: source.tables[2].name: "Public.\"outbox\"" is source.tables[1] already`,
				`cdcpub.yml:6: source.tables[3].name: "a-b" is not a table name: want schema.name, with double quotes around a part that is not a plain identifier`,
			},
		},
		{
			name: "a clash with a default only if the value itself was accepted",
			file: "relay: {window: 100000, span: lots}\n",
			want: []string{"cdcpub.yml:1: relay.span: expected a whole number, got \"lots\""},
		},
		{
			name: "files that are no single mapping",
			file: "- a\n---\nb: c\n",
			want: []string{
				"cdcpub.yml: holds more than one YAML document; only one is read",
				"cdcpub.yml:1: expected a mapping, got a list",
			},
		},
		{
			name: "broken YAML with its line",
			file: "relay:\n\twindow: 1\n",
			want: []string{"cdcpub.yml: parse configuration: yaml: line 2: found character that cannot start any token"},
		},
		{
			name: "merge keys and other keys that are no names",
			file: "log: &l {level: info}\nrelay: {<<: *l, [a]: b}\n",
			want: []string{
				"cdcpub.yml:2: relay: expected a name as the key",
				"cdcpub.yml:2: relay: expected a name as the key",
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := load(t, tt.file, requiredEnv(tt.env...))
			wantProblems(t, err, tt.want...)
		})
	}
}

func TestRequiredKeys(t *testing.T) {
	t.Chdir(t.TempDir())
	_, err := LoadConfig("", nil)
	wantProblems(t, err, "source.dsn: is not set: set it in the file or as CDCPUB_SOURCE_DSN, or source.dsn_file")
}
