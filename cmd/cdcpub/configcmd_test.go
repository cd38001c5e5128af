package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "rewrite docs/configuration.md and deploy/cdcpub.schema.json")

// command runs the command line in process, without a server.
func command(t *testing.T, environ []string, args ...string) (stdout string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &out, err: &errs, environ: environ}
	cmd := a.root()
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestConfigSaysWhereEachValueComesFrom(t *testing.T) {
	t.Chdir(t.TempDir())
	file := "router:\n  headers: {team: shop}\nrelay:\n  window: 100\n  span: 5000\nsource:\n  tables:\n    - name: a.b\n"
	if err := os.WriteFile("cdcpub.yml", []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	env := requiredEnv("CDCPUB_RELAY_SPAN=6000")
	out, err := command(t, env, "config")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"dsn: postgres://app:***@127.0.0.1:5432/shop # CDCPUB_SOURCE_DSN\n", "- amqp://app:***@127.0.0.1:5672/ # CDCPUB_PUBLISH_URL\n",
		"slot: cdcpub # default\n", "window: 100 # cdcpub.yml:4\n", "span: 6000 # CDCPUB_RELAY_SPAN\n",
		"name: a.b # cdcpub.yml:8\n", "team: shop # cdcpub.yml:2\n", "confirm_timeout: 60s # default\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("config does not print %q:\n%s", want, out)
		}
	}
	// It is a configuration file again: the same but for the secrets.
	want, err := LoadConfig("", env)
	if err != nil {
		t.Fatal(err)
	}
	back := strings.ReplaceAll(out, "***", "pw")
	if err := os.WriteFile("again.yml", []byte(back), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := LoadConfig("again.yml", nil)
	wantConfig(t, got, err, want)
}

func TestConfigAsJSONHasEveryKey(t *testing.T) {
	t.Chdir(t.TempDir())
	out, err := command(t, requiredEnv("CDCPUB_LOG_LEVEL=debug"), "config", "--output", "json")
	if err != nil {
		t.Fatal(err)
	}
	var list []effectiveValue
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatal(err)
	}
	byKey := map[string]effectiveValue{}
	for _, v := range list {
		byKey[v.Key] = v
	}
	for _, k := range configKeys() {
		if _, ok := byKey[k.Path]; !ok && k.index != nil {
			t.Errorf("%s is missing", k.Path)
		}
	}
	if d := cmp.Diff(effectiveValue{"log.level", "debug", "CDCPUB_LOG_LEVEL"}, byKey["log.level"]); d != "" {
		t.Errorf("log.level (-want +got):\n%s", d)
	}
	if strings.Contains(out, ":pw@") {
		t.Error("a password is shown")
	}
}

func TestValidateAcceptsWhatRunAccepts(t *testing.T) {
	for name, tc := range map[string]struct {
		env  []string
		want string // part of the error; empty: valid
	}{
		"what is required":                {requiredEnv(), ""},
		"a broker is missing":             {[]string{"CDCPUB_SOURCE_DSN=" + testDSN}, "publish.urls"},
		"a template that does not exist":  {requiredEnv("CDCPUB_ROUTER_ROUTING_KEY={nothing}"), "nothing"},
		"a broker URL with a wrong query": {requiredEnv("CDCPUB_PUBLISH_URL=amqp://h/?x=1"), "unknown query parameter"},
		"an unknown key":                  {requiredEnv("CDCPUB_RELAY_WINDO=1"), "did you mean"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			out, err := command(t, tc.env, "config", "--validate")
			switch {
			case tc.want == "" && (err != nil || out != "the configuration is valid\n"):
				t.Errorf("%q, %v", out, err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || exitCode(err) != exitUsage):
				t.Errorf("error %v (exit %d), want one with %q and exit 2", err, exitCode(err), tc.want)
			}
		})
	}
}

// golden compares what the types generate with the file that people read.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s is not what the types say; run: go test ./cmd/cdcpub -update\n%s", path, d)
	}
}

func TestSchemaFileIsTheGeneratedOne(t *testing.T) {
	out, err := command(t, nil, "config", "--schema")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, filepath.Join("..", "..", "deploy", "cdcpub.schema.json"), out)
}

func TestSampleIsValidBySchema(t *testing.T) {
	b, err := json.Marshal(configSchema())
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(b, &schema); err != nil {
		t.Fatal(err)
	}
	sample, err := os.ReadFile(samplePath)
	if err != nil {
		t.Fatal(err)
	}
	text := string(sample)
	for name, tc := range map[string]struct {
		text string
		ok   bool
	}{
		"the sample":              {text, true},
		"an unknown key":          {text + "\nextra: {}\n", false},
		"an unknown key inside":   {strings.Replace(text, "\nlog:\n", "\nlog:\n  levl: info\n", 1), false},
		"a value that is none":    {strings.Replace(text, "mode: initial", "mode: always", 1), false},
		"a size without a unit":   {strings.Replace(text, "window_bytes: 32MiB", "window_bytes: 33554432", 1), true},
		"a size with a wrong one": {strings.Replace(text, "window_bytes: 32MiB", "window_bytes: 32MB", 1), false},
		"a duration without one":  {strings.Replace(text, "interval: 1s", "interval: 1", 1), false},
		"a list that is none":     {strings.Replace(text, "urls: []", "urls: x", 1), false},
		"a policy not built yet":  {strings.Replace(text, "on_unroutable: retry", "on_unroutable: park", 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			var doc any
			if err := yaml.Unmarshal([]byte(tc.text), &doc); err != nil {
				t.Fatal(err)
			}
			if problem := violates("", doc, schema); (problem == "") != tc.ok {
				t.Errorf("schema says %q, want valid: %t", problem, tc.ok)
			}
		})
	}
}

// violates checks v against the part of JSON Schema that configSchema uses, and
// says what is wrong.
func violates(path string, v any, schema map[string]any) string {
	if choices, ok := schema["anyOf"].([]any); ok {
		for _, s := range choices {
			if violates(path, v, s.(map[string]any)) == "" {
				return ""
			}
		}
		return path + ": none of anyOf"
	}
	typeOK := map[string]func(any) bool{
		"object":  func(v any) bool { _, ok := v.(map[string]any); return ok },
		"array":   func(v any) bool { _, ok := v.([]any); return ok },
		"string":  func(v any) bool { _, ok := v.(string); return ok },
		"boolean": func(v any) bool { _, ok := v.(bool); return ok },
		"integer": func(v any) bool { _, ok := v.(int); return ok },
	}[schema["type"].(string)]
	if !typeOK(v) {
		return fmt.Sprintf("%s: %v is no %s", path, v, schema["type"])
	}
	switch v := v.(type) {
	case map[string]any:
		properties, _ := schema["properties"].(map[string]any)
		for key, value := range v {
			sub, ok := properties[key].(map[string]any)
			if !ok {
				if sub, ok = schema["additionalProperties"].(map[string]any); !ok {
					return path + "." + key + ": unknown"
				}
			}
			if problem := violates(path+"."+key, value, sub); problem != "" {
				return problem
			}
		}
	case []any:
		for _, item := range v {
			if problem := violates(path+"[]", item, schema["items"].(map[string]any)); problem != "" {
				return problem
			}
		}
	case string:
		if enum, ok := schema["enum"].([]any); ok && !slices.Contains(enum, any(v)) {
			return fmt.Sprintf("%s: %q is not one of %v", path, v, enum)
		}
		if p, ok := schema["pattern"].(string); ok && !regexp.MustCompile(p).MatchString(v) {
			return fmt.Sprintf("%s: %q does not match %s", path, v, p)
		}
	}
	return ""
}

// The table of keys in the documentation is between two comments.
func TestDocumentedKeysAreTheGeneratedOnes(t *testing.T) {
	const begin, end = "<!-- keys: made by go test ./cmd/cdcpub -update -->\n", "<!-- end of keys -->\n"
	path := filepath.Join("..", "..", "docs", "configuration.md")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(b), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the table of keys", path)
	}
	golden(t, path, head+begin+keyTable()+end+tail)
	// The prose must not promise or deny what the code does not.
	for _, key := range unbuiltKeys() {
		if !strings.Contains(head+tail, "`"+key+"`") {
			t.Errorf("%s does not say that %s is not built", path, key)
		}
	}
}

func keyTable() string {
	var b strings.Builder
	section := ""
	for _, k := range configKeys() {
		top, _, _ := strings.Cut(k.Path, ".")
		if top != section {
			section = top
			fmt.Fprintf(&b, "\n### %s\n\n| key | type | default | meaning |\n|---|---|---|---|\n", section)
		}
		def := ""
		if k.Default != "" && k.Default != "{}" && k.Default != "[]" {
			def = "`" + k.Default + "`"
		}
		doc := strings.ReplaceAll(k.Doc, "|", "\\|")
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", k.Path, k.Type, def, doc)
	}
	b.WriteString("\n")
	return b.String()
}
