package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestByteSize(t *testing.T) {
	tests := []struct {
		in   string
		want ByteSize
		out  string
	}{
		{"0", 0, "0"},
		{"1000", 1000, "1000"},
		{"64KiB", 64 << 10, "64KiB"},
		{"1024KiB", 1 << 20, "1MiB"},
		{"32MiB", 32 << 20, "32MiB"},
		{"3GiB", 3 << 30, "3GiB"},
		{"9223372036854775807", 1<<63 - 1, "9223372036854775807"},
		{"8589934591GiB", 8589934591 << 30, "8589934591GiB"},
	}
	for _, tt := range tests {
		got, err := ParseByteSize(tt.in)
		if err != nil || got != tt.want {
			t.Errorf("ParseByteSize(%q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
		if got.String() != tt.out {
			t.Errorf("ByteSize(%d).String() = %q, want %q", got, got.String(), tt.out)
		}
	}
	for _, in := range []string{"", "MiB", "-1", "+1", "1.5MiB", "32MB", "32mib", "32 MiB", "1_000", "8589934592GiB", "9223372036854775808"} {
		if got, err := ParseByteSize(in); err == nil {
			t.Errorf("ParseByteSize(%q) = %d, want an error", in, got)
		}
	}
}

func TestNearest(t *testing.T) {
	names := []string{"window", "window_bytes", "span", "ordering"}
	tests := []struct{ in, want string }{
		{"windw", "window"}, {"windowbytes", "window_bytes"}, {"spam", "span"}, {"order", ""}, {"ordring", "ordering"}, {"xyzzy", ""},
	}
	for _, tt := range tests {
		if got, _ := nearest(tt.in, names); got != tt.want {
			t.Errorf("nearest(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

// samplePath is the commented file that documents every key.
const samplePath = "../../deploy/cdcpub.yml"

func TestSampleHoldsTheDefaults(t *testing.T) {
	got, err := LoadConfig(samplePath, requiredEnv())
	wantConfig(t, got, err, requiredConfig())
}

func TestSampleHoldsEveryKey(t *testing.T) {
	l := loader{origin: map[string]string{}, bad: map[string]bool{}}
	cfg := NewConfig()
	l.loadFile(&cfg, samplePath)
	for _, k := range configKeys() {
		path := strings.ReplaceAll(k.Path, "[]", "[0]")
		if l.origin[path] == "" {
			t.Errorf("%s does not hold %s", samplePath, path)
		}
	}
}

func TestTableOfKeys(t *testing.T) {
	names := map[string]string{}
	byPath := map[string]Key{}
	for _, k := range configKeys() {
		if k.Doc == "" && k.Path != "source.tables[].columns" {
			t.Errorf("%s has no doc", k.Path)
		}
		if other, twice := names[envName(k.Path)]; twice {
			t.Errorf("%s and %s share the variable %s", k.Path, other, envName(k.Path))
		}
		names[envName(k.Path)] = k.Path
		byPath[k.Path] = k
		if future, planned := notBuilt(k.Path); planned {
			t.Errorf("%s is a key and also not built (%s)", k.Path, future)
		}
	}
	want := []Key{
		{Path: "source.tables", Type: "a list of mappings", Default: "[{name: public.outbox}]"},
		{Path: "source.tables[].columns.extra", Type: "a list of strings", Default: "[]"},
		{Path: "snapshot.mode", Type: "initial or never", Default: "initial"},
		{Path: "router.headers", Type: "a mapping of names to strings", Default: "{}"},
		{Path: "relay.window_bytes", Type: "a size such as 32MiB", Default: "32MiB"},
		{Path: "publish.urls", Type: "a list of strings", Default: "[]"},
		{Path: "publish.mandatory", Type: "true or false", Default: "true"},
		{Path: "publish.confirm_timeout", Type: "a duration such as 60s", Default: "60s"},
		{Path: "offsets.every", Type: "a whole number", Default: "2000"},
	}
	for _, w := range want {
		got := byPath[w.Path]
		w.Doc = got.Doc
		if diff := cmp.Diff(w, got, cmpopts.IgnoreUnexported(Key{})); diff != "" {
			t.Errorf("key differs (-want +got):\n%s", diff)
		}
	}
}

// TestEveryKeyFromTheEnvironment sets each key by its variable to its default:
// what the table prints must be what the loader reads.
func TestEveryKeyFromTheEnvironment(t *testing.T) {
	t.Chdir(t.TempDir())
	var env []string
	for _, k := range configKeys() {
		if k.index != nil {
			env = append(env, envName(k.Path)+"="+k.Default)
		}
	}
	env = append(env, "CDCPUB_SOURCE_DSN="+testDSN, "CDCPUB_PUBLISH_URLS=["+testURL+"]")
	got, err := LoadConfig("", env)
	wantConfig(t, got, err, requiredConfig())
}

func FuzzLoadConfig(f *testing.F) {
	sample, err := os.ReadFile(samplePath)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sample)
	for _, s := range []string{"a: &a [*a]", "? [x]\n: y", "!!binary x", "source: !foo {}", "relay: {<<: [*x]}", "--- \n...\n"} {
		f.Add([]byte(s))
	}
	file := filepath.Join(f.TempDir(), "fuzz.yml")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		// Nothing to compare with: it must not panic, and a refusal must say something.
		if _, err := LoadConfig(file, requiredEnv()); err != nil && strings.TrimSpace(err.Error()) == "" {
			t.Error("refused without a reason")
		}
	})
}
