package tests

import (
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/internal/testproc"
)

// replaceFile changes a secret as Kubernetes does, so that nobody reads half of it.
func replaceFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// requirePassword has role log in with a password. Other roles go on without one.
func requirePassword(t *testing.T, pg *pgtest.Server, role string) {
	t.Helper()
	path := filepath.Join(pg.DataDir(), "pg_hba.conf")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append([]byte("host all "+role+" all scram-sha-256\n"), b...), 0o600); err != nil {
		t.Fatal(err)
	}
	pgtest.Exec(t, pg.DSN("postgres"), "SELECT pg_reload_conf()")
}

// Both passwords change under load, in the order that docs/configuration.md gives,
// and old sessions are ended: the connector comes back by itself.
func TestRotatedPasswordsAreReadAgain(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	pg, rabbit := pgtest.Start(t), rabbittest.Start(t)
	name := rabbittest.Name(t)
	dsn := pg.DSN("postgres")
	ctl := func(args ...string) {
		t.Helper()
		if _, err := rabbit.Ctl(args...); err != nil {
			t.Fatal(err)
		}
	}
	passwords := []string{"first " + testproc.RandomHex(8), "second'" + testproc.RandomHex(8), "third/@" + testproc.RandomHex(8)}
	setPostgres := func(password string) {
		pgtest.Exec(t, dsn, "ALTER ROLE relay PASSWORD '"+strings.ReplaceAll(password, "'", "''")+"'")
	}
	pgtest.Exec(t, dsn, "CREATE ROLE relay LOGIN REPLICATION")
	requirePassword(t, pg, "relay")
	setPostgres(passwords[0])
	ctl("add_user", "relay", passwords[0])
	ctl("set_permissions", "relay", "^$", ".*", "^$")

	u, err := url.Parse(rabbit.URL())
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User("relay")
	rabbittest.Queue(t, rabbit.URL(), name, name+".order", "#", nil)
	c := newConnector(t, dsn, u.String(), name)
	c.must("init", "--create-table")
	pgtest.Exec(t, dsn, "GRANT SELECT ON outbox TO relay")
	c.env["CDCPUB_SOURCE_DSN"] = strings.Replace(dsn, "postgres@", "relay@", 1)
	for _, key := range []string{"CDCPUB_SOURCE_PASSWORD_FILE", "CDCPUB_PUBLISH_PASSWORD_FILE"} {
		c.env[key] = filepath.Join(t.TempDir(), "password")
		replaceFile(t, c.env[key], passwords[0])
	}
	prepare(t, dsn)
	l := startLoad(t, dsn, 2, seed, 20*time.Millisecond)
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
	pid := c.proc.PID()
	for _, password := range passwords[1:] {
		replaceFile(t, c.env["CDCPUB_SOURCE_PASSWORD_FILE"], password)
		replaceFile(t, c.env["CDCPUB_PUBLISH_PASSWORD_FILE"], password)
		setPostgres(password)
		ctl("change_password", "relay", password)
		before := c.status()
		pgtest.Exec(t, dsn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active_pid IS NOT NULL")
		ctl("close_all_user_connections", "relay", "rotated")
		eventually(t, time.Minute, "the connector streams with the new password", func() bool {
			s := c.status()
			return s.Ready && s.Counters.Confirmed > before.Counters.Confirmed+100
		})
	}
	l.stop()
	caughtUp(t, c, dsn, time.Minute)
	if c.proc.PID() != pid || !c.proc.Running() {
		t.Error("the connector is not the same process any more")
	}
	stdout, _, _ := c.cli("status", "--output", "json")
	effective, _, _ := c.cli("config")
	c.stop()
	v := judge(t, dsn, rabbit.URL(), name)
	t.Log(v)
	if v.lost != 0 || v.phantom != 0 || v.reordered != 0 || v.committed < 1000 {
		t.Errorf("%s, want 1000 and more, none lost, phantom or reordered", v)
	}
	logged, err := os.ReadFile(c.log.Name())
	if err != nil {
		t.Fatal(err)
	}
	for _, password := range passwords {
		for where, text := range map[string]string{"log": string(logged), "status": stdout, "config": effective} {
			if strings.Contains(text, password) || strings.Contains(text, url.QueryEscape(password)) {
				t.Errorf("the %s shows a password", where)
			}
		}
	}
	if !strings.Contains(string(logged), "starting again") {
		t.Error("the sessions were not ended")
	}
}
