package main

import (
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func writeFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// awkward are passwords that a generator may make and a quoting may lose.
var awkward = []string{"simple", "with space", `qu'ote`, `back\slash`, `a\'b`, "p@ss:w/rd?&#%=", "ümlaut€", " leading and trailing ", `"`, "tab\there"}

func TestAPasswordFromAFileIsThePasswordThatIsUsed(t *testing.T) {
	for _, password := range awkward {
		for _, dsn := range []string{"postgres://app@db:5433/shop", "postgres://app@db/shop?sslmode=disable", "postgresql:///shop?user=app&host=db",
			"host=db user=app dbname=shop", "postgres://app@a:5432,b:5433/shop?target_session_attrs=read-write"} {
			for _, end := range []string{"", "\n", "\r\n"} {
				cfg := NewConfig()
				cfg.Source.DSN, cfg.Source.PasswordFile = dsn, writeFile(t, password+end)
				got, err := cfg.sourceDSN()
				if err != nil {
					t.Fatal(err)
				}
				pc, err := pgconn.ParseConfig(got)
				if err != nil || pc.Password != password || pc.User != "app" || pc.Database != "shop" {
					t.Errorf("%s with password %q: %v, password %q, user %q", dsn, password, err, pc.Password, pc.User)
				}
			}
		}
		cfg := NewConfig()
		cfg.Publish.URLs, cfg.Publish.PasswordFile = []string{"amqp://app@mq:5673/%2fshop", "amqps://app@mq2/"}, writeFile(t, password+"\n")
		urls, err := cfg.brokerURLs()
		if err != nil || len(urls) != 2 {
			t.Fatalf("brokerURLs = %v, %v", urls, err)
		}
		for _, s := range urls {
			u, err := url.Parse(s)
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := u.User.Password(); got != password || checkBrokerURL(s) != "" {
				t.Errorf("%s: password %q, want %q", s, got, password)
			}
		}
	}
}

func TestFilesAreReadAgain(t *testing.T) {
	dsn, urls := writeFile(t, "postgres://app:one@db/shop\n"), writeFile(t, "amqp://a:one@x/\n\namqp://a:one@y/\n")
	t.Chdir(t.TempDir())
	cfg, err := LoadConfig("", []string{"CDCPUB_SOURCE_DSN_FILE=" + dsn, "CDCPUB_PUBLISH_URL_FILE=" + urls})
	if err != nil {
		t.Fatal(err)
	}
	for _, password := range []string{"one", "two"} {
		if err := os.WriteFile(dsn, []byte("postgres://app:"+password+"@db/shop"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(urls, []byte("amqp://a:"+password+"@x/\n\namqp://a:"+password+"@y/"), 0o600); err != nil {
			t.Fatal(err)
		}
		gotDSN, err := cfg.sourceDSN()
		gotURLs, err2 := cfg.brokerURLs()
		if err != nil || err2 != nil || !strings.Contains(gotDSN, password) || len(gotURLs) != 2 || !strings.Contains(gotURLs[1], password) {
			t.Errorf("%q, %q, %v, %v: want password %s", gotDSN, gotURLs, err, err2, password)
		}
	}
	if err := os.Remove(dsn); err != nil {
		t.Fatal(err)
	}
	if _, err := cfg.sourceDSN(); err == nil {
		t.Error("a file that is gone was read")
	}
}

func TestSecretFilesThatCannotBeUsedAreRefusedAtTheStart(t *testing.T) {
	password, dsn := writeFile(t, "hunter2\n"), writeFile(t, "postgres://u:hunter2@h/db")
	empty, nonsense := writeFile(t, "\n"), writeFile(t, "hunter2")
	for name, tc := range map[string]struct {
		env  []string
		want string
	}{
		"a DSN and a file with one": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_SOURCE_DSN_FILE=" + dsn}, "CDCPUB_SOURCE_DSN_FILE: source.dsn_file: is set beside source.dsn"},
		"URLs and a file with some": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_PUBLISH_URL=" + testURL, "CDCPUB_PUBLISH_URL_FILE=" + dsn}, "publish.urls_file: is set beside publish.urls"},
		"a variable and its other name": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_PUBLISH_URLS_FILE=x", "CDCPUB_PUBLISH_URL_FILE=y"}, "CDCPUB_PUBLISH_URL_FILE: CDCPUB_PUBLISH_URLS_FILE is set too"},
		"a password twice for PostgreSQL": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_SOURCE_PASSWORD_FILE=" + password}, "source.password_file: the connection string has a password already"},
		"a password twice for PostgreSQL, in words": {
			[]string{"CDCPUB_SOURCE_DSN=host=h password='x y'", "CDCPUB_SOURCE_PASSWORD_FILE=" + password}, "has a password already"},
		"a password twice for the broker": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_PUBLISH_URL=" + testURL, "CDCPUB_PUBLISH_PASSWORD_FILE=" + password}, "publish.urls[0] has a password already"},
		"a password and no user": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_PUBLISH_URL=amqp://h/", "CDCPUB_PUBLISH_PASSWORD_FILE=" + password}, "names no user"},
		"a file that is not there": {
			[]string{"CDCPUB_SOURCE_DSN_FILE=/nowhere/dsn"}, `CDCPUB_SOURCE_DSN_FILE: source.dsn_file: read "/nowhere/dsn": no such file or directory`},
		"an empty file": {
			[]string{"CDCPUB_SOURCE_DSN_FILE=" + empty}, "it is empty"},
		"a file with something else": {
			[]string{"CDCPUB_SOURCE_DSN_FILE=" + nonsense}, "source.dsn_file: is not a connection string"},
		"a file with other URLs": {
			[]string{"CDCPUB_SOURCE_DSN=" + testDSN, "CDCPUB_PUBLISH_URL_FILE=" + dsn}, "publish.urls_file: is not an amqp:// or amqps:// URL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			_, err := LoadConfig("", tc.env)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want one with %q", err, tc.want)
			}
			wantNoSecret(t, err)
		})
	}
}

func TestMaskedConnectionStringsShowEverythingButPasswords(t *testing.T) {
	for dsn, want := range map[string]string{
		"":                               "",
		"postgres://app@db/shop":         "postgres://app@db/shop",
		"postgres://app:hunter2@db/shop": "postgres://app:***@db/shop",
		"postgresql://app:hunter2@a:1,b:2/shop?sslmode=disable":  "postgresql://app:***@a:1,b:2/shop?sslmode=disable",
		"postgres://app@db/shop?password=hunter2&sslmode=prefer": "postgres://app@db/shop?password=***&sslmode=prefer",
		"postgres://app:hunter%232@db/shop":                      "postgres://app:***@db/shop",
		"host=db user=app password=hunter2 dbname=shop":          "host=db user=app password=*** dbname=shop",
		`host=db password = 'hunter2 with \' quote' user=app`:    `host=db password = *** user=app`,
		`host=db password=hunter\ 2 user=app`:                    `host=db password=*** user=app`,
		"host=db PASSWORD=hunter2":                               "host=db PASSWORD=***",
		"postgres://app:hunter2/x@db/shop":                       masked,
		"hunter2":                                                masked,
		"host=db user=app password=db dbname=shop":               masked,
	} {
		got := maskDSN(dsn)
		if strings.Contains(got, "hunter") {
			t.Errorf("maskDSN(%q) = %q shows the password", dsn, got)
		}
		if got != want && got != masked {
			t.Errorf("maskDSN(%q) = %q, want %q", dsn, got, want)
		}
		if got == masked && want != masked && want != "" {
			t.Errorf("maskDSN(%q) hides everything, want %q", dsn, want)
		}
	}
	for s, want := range map[string]string{
		"amqp://app:hunter2@mq:5672/%2fshop?heartbeat=5": "amqp://app:***@mq:5672/%2fshop?heartbeat=5",
		"amqps://mq/":              "amqps://mq/",
		"amqp://app:hunter/2@mq/":  masked,
		"amqp://app:12/hunter@mq/": masked, // a port and a path
		"amqp://app:12?hunter@mq/": masked,
		"amqp://app:12#hunter@mq/": masked,
	} {
		if got := maskURL(s); got != want {
			t.Errorf("maskURL(%q) = %q, want %q", s, got, want)
		}
	}
}
