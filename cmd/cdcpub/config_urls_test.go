package main

import (
	"strings"
	"testing"
)

func TestConnectionStrings(t *testing.T) {
	const badDSN, badURL = "source.dsn: is not a connection string", "publish.urls[0]: is not"
	tests := []struct {
		name, dsn, url string
		want           string // part of the error; empty: accepted
	}{
		{name: "a URL with several hosts", dsn: "postgres://u:pw@a:5432,b:5433/db?target_session_attrs=read-write"},
		{name: "key=value words", dsn: "host=/run/postgresql dbname=shop user=app password='a b'"},
		{name: "TLS for the broker", url: "amqps://u:pw@mq.example.com/%2fshop"},
		{name: "an unencoded slash in the DSN's password", dsn: "postgres://u:hunter/2@h/db", want: badDSN},
		{name: "an unencoded hash in the DSN's password, as libpq takes it", dsn: "postgres://u:hunter#2@h/db"},
		{name: "a bad percent escape in the DSN's password", dsn: "postgres://u:hunter%zz@h/db", want: badDSN},
		{name: "a wrong port in the DSN", dsn: "postgres://u:hunter2@h:port/db", want: badDSN},
		{name: "a wrong sslmode in the DSN", dsn: "host=h password=hunter2 sslmode=maybe", want: badDSN},
		{name: "words that are no pairs", dsn: "hunter2", want: badDSN},
		{name: "a missing certificate", dsn: "host=h password=hunter2 sslmode=verify-full sslrootcert=/nowhere/ca.pem",
			want: "source.dsn: names a file that cannot be used: \"/nowhere/ca.pem\": no such file or directory"},
		{name: "an unencoded slash in the broker's password", url: "amqp://u:hunter/2@h/", want: badURL + " a URL"},
		{name: "a password that reads as a port and a path", url: "amqp://u:12/hunter2@h/", want: badURL + " a URL"},
		{name: "the same in the DSN", dsn: "postgres://u:12/hunter2@h/db", want: badDSN},
		{name: "a bad percent escape in the broker's password", url: "amqp://u:hunter%zz@h/", want: badURL + " a URL"},
		{name: "a space in the broker's URL", url: "amqp://u:hunter2@h/ ", want: badURL + " a URL"},
		{name: "another scheme", url: "http://u:hunter2@h/", want: badURL + " an amqp:// or amqps:// URL"},
		{name: "no scheme", url: "u:hunter2@h", want: badURL + " a"},
		{name: "no host", url: "amqp://u:hunter2@/", want: "publish.urls[0]: has no host"},
		{name: "a port above the highest", url: "amqp://u:hunter2@h:70000/", want: "publish.urls[0]: has a port that is not between"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			env := requiredEnv()
			if tt.dsn != "" {
				env = append(env, "CDCPUB_SOURCE_DSN="+tt.dsn)
			}
			if tt.url != "" {
				env = append(env, "CDCPUB_PUBLISH_URL="+tt.url)
			}
			_, err := LoadConfig("", env)
			if tt.want == "" {
				if err != nil {
					t.Fatalf("refused: %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error is %q, want one with %q", err, tt.want)
			}
			wantNoSecret(t, err)
		})
	}
}

// wantNoSecret checks for the password of these tests, whole or cut where a URL
// parser would cut it.
func wantNoSecret(t *testing.T, err error) {
	t.Helper()
	if strings.Contains(err.Error(), "hunter") {
		t.Errorf("error shows a password: %v", err)
	}
}

func TestMisplacedSecretsAreNotShown(t *testing.T) {
	tests := []struct {
		name, file string
		env        []string
	}{
		{name: "a DSN under another key", file: "source: {slot: 'postgres://u:hunter2@h/db'}"},
		{name: "a DSN in place of a file's name", file: "source: {password_file: 'postgres://u:hunter2@h/db'}"},
		{name: "a DSN where a number belongs", file: "relay: {window: 'host=h password=hunter2'}"},
		{name: "a DSN as a key", file: "source: {'postgres://u:hunter2@h/db': x}"},
		{name: "a DSN as a key twice", file: "source: {'postgres://u:hunter2@h/db': x, 'postgres://u:hunter2@h/db': y}"},
		{name: "a URL as a header's name", file: "router: {headers: {'amqp://u:hunter2@h': 5}}"},
		{name: "a URL where a list belongs", file: "publish: {urls: 'amqp://u:hunter2@h'}"},
		{name: "a number as a URL", file: "publish: {urls: [{hunter2: x}]}"},
		{name: "a URL in braces", env: []string{"CDCPUB_PUBLISH_URLS={amqp://u:hunter2@h}"}},
		{name: "a URL in broken YAML", env: []string{"CDCPUB_PUBLISH_URLS=[amqp://u:hunter2@h"}},
		{name: "a URL beside its key", file: "publish:\n  urls: [a]\n amqp://u:hunter2@h\n"},
		{name: "an unknown variable", env: []string{"CDCPUB_DSN=postgres://u:hunter2@h/db"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := load(t, tt.file, append([]string{"CDCPUB_SOURCE_DSN=" + testDSN}, tt.env...))
			if err == nil {
				t.Fatal("accepted")
			}
			wantNoSecret(t, err)
		})
	}
}
