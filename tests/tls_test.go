package tests

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/internal/testproc"
)

// authority is a private certificate authority, as a company has one.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) authority {
	t.Helper()
	a := authority{t: t}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	a.cert, a.key = template, newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// pem is the authority's certificate.
func (a authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// issue makes the certificate of a server with that host name, or of a client with
// that role, for as long as is given from an hour ago.
func (a authority) issue(name string, lasts time.Duration) (cert, key []byte) {
	a.t.Helper()
	k := newKey(a.t)
	template := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lasts - time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &k.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
}

func writeFile(t *testing.T, path string, content []byte) string {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// useTLS has the server show a certificate, ask clients for one of the authority,
// and let role in only encrypted.
func useTLS(t *testing.T, pg *pgtest.Server, a authority, cert, key []byte, hba string) {
	t.Helper()
	at := func(name string) string { return filepath.Join(pg.DataDir(), name) }
	info, err := os.Stat(pg.DataDir())
	if err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	for name, content := range map[string][]byte{"server.crt": cert, "server.key": key, "root.crt": a.pem()} {
		writeFile(t, at(name), content)
		if err := os.Chown(at(name), int(owner.Uid), int(owner.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(at("pg_hba.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(b), hba) {
		writeFile(t, at("pg_hba.conf"), append([]byte(hba), b...))
	}
	before := pgtest.Query[time.Time](t, pg.DSN("postgres"), "SELECT pg_conf_load_time()")
	pgtest.Exec(t, pg.DSN("postgres"), "ALTER SYSTEM SET ssl_ca_file = 'root.crt'", "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
	eventually(t, 10*time.Second, "the server has read the new certificate", func() bool {
		return pgtest.Query[bool](t, pg.DSN("postgres"), "SELECT pg_conf_load_time() > $1 AND current_setting('ssl') = 'on'", before)
	})
}

// secureDSN is for relay, by a host's name rather than its address.
func secureDSN(t *testing.T, pg *pgtest.Server, host, query string) string {
	t.Helper()
	_, port, ok := strings.Cut(pg.Addr(), ":")
	if !ok {
		t.Fatalf("no port in %s", pg.Addr())
	}
	return "postgres://relay:top-secret@" + host + ":" + port + "/postgres?" + query
}

const onlyEncrypted = "hostssl all relay all scram-sha-256\nhostnossl all relay all reject\n"

// With verify-full and a private authority, every connection of the connector is
// encrypted, to the database and to the broker, and events arrive.
func TestEventsPassThroughTLSOfAPrivateAuthority(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, "private authority")
	dir := t.TempDir()
	ca := writeFile(t, filepath.Join(dir, "ca.pem"), a.pem())
	cert, key := a.issue("localhost", 2*time.Hour)
	port, err := testproc.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	rabbit := rabbittest.Start(t,
		rabbittest.Setting("listeners.ssl.1", "127.0.0.1:"+strconv.Itoa(port)),
		rabbittest.Setting("ssl_options.cacertfile", ca),
		rabbittest.Setting("ssl_options.certfile", writeFile(t, filepath.Join(dir, "rabbit.crt"), cert)),
		rabbittest.Setting("ssl_options.keyfile", writeFile(t, filepath.Join(dir, "rabbit.key"), key)))
	broker, err := url.Parse(rabbit.URL())
	if err != nil {
		t.Fatal(err)
	}
	broker.Scheme, broker.Host = "amqps", "localhost:"+strconv.Itoa(port)
	pg := pgtest.Start(t)
	admin := pg.DSN("postgres")
	pgtest.Exec(t, admin, "CREATE ROLE relay LOGIN REPLICATION PASSWORD 'top-secret'")
	useTLS(t, pg, a, cert, key, onlyEncrypted)

	name := rabbittest.Name(t)
	insert := "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', gen_random_uuid(), 'Made', '{}', 1)"
	c := newConnector(t, admin, broker.String(), name)
	c.env["SSL_CERT_FILE"] = ca
	c.must("init", "--create-table")
	pgtest.Exec(t, admin, "GRANT SELECT ON outbox TO relay", insert)
	rabbittest.Queue(t, rabbit.URL(), name, name+".order", "#", nil)
	c.env["CDCPUB_SOURCE_DSN"] = secureDSN(t, pg, "localhost", "sslmode=verify-full&sslrootcert="+url.QueryEscape(ca))
	if failed, output := c.check(); len(failed) > 0 {
		t.Fatalf("check:\n%s", output)
	}
	c.start()
	rabbittest.Drain(t, rabbit.URL(), name, 1, time.Minute) // an old row
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().State == "streaming" })
	pgtest.Exec(t, admin, insert)
	rabbittest.Drain(t, rabbit.URL(), name, 1, time.Minute)
	if got := pgtest.Query[string](t, admin, "SELECT string_agg(DISTINCT s.ssl || ' ' || s.version, ',') FROM pg_stat_replication r JOIN pg_stat_ssl s USING (pid)"); got != "true TLSv1.3" {
		t.Errorf("the walsender's connection is %q, want TLSv1.3", got)
	}

	// A new authority: its certificate is added to the file first, then the server's
	// is changed. The connector reads the file at the next connection.
	b := newAuthority(t, "next authority")
	replaceFile(t, ca, string(a.pem())+string(b.pem()))
	cert, key = b.issue("localhost", 2*time.Hour)
	useTLS(t, pg, b, cert, key, onlyEncrypted)
	pgtest.Exec(t, admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'relay'", insert)
	rabbittest.Drain(t, rabbit.URL(), name, 1, time.Minute)
	c.stop()
	c.env["CDCPUB_SOURCE_DSN"] = admin
	c.must("teardown", "--yes")
}

// What cannot be verified is not talked to: check names the reason, run waits with
// it, and neither shows the password. Once the server has the right certificate,
// run goes on by itself.
func TestTLSThatCannotBeVerifiedIsRefused(t *testing.T) {
	t.Parallel()
	right, wrong := newAuthority(t, "private authority"), newAuthority(t, "somebody else")
	dir := t.TempDir()
	ca := url.QueryEscape(writeFile(t, filepath.Join(dir, "ca.pem"), right.pem()))
	other := url.QueryEscape(writeFile(t, filepath.Join(dir, "other.pem"), wrong.pem()))
	pg := pgtest.Start(t)
	admin := pg.DSN("postgres")
	pgtest.Exec(t, admin, "CREATE ROLE relay LOGIN REPLICATION PASSWORD 'top-secret'")
	good, goodKey := right.issue("localhost", 2*time.Hour)
	old, oldKey := right.issue("localhost", time.Minute)
	for name, tc := range map[string]struct {
		host, query string
		cert, key   []byte
		says        string
	}{
		"the server's authority is not ours":     {"localhost", "sslmode=verify-full&sslrootcert=" + other, good, goodKey, "certificate signed by unknown authority"},
		"the authority is not the system's":      {"localhost", "sslmode=verify-full", good, goodKey, "certificate signed by unknown authority"},
		"the server has another name":            {"127.0.0.1", "sslmode=verify-full&sslrootcert=" + ca, good, goodKey, "cannot validate certificate for 127.0.0.1"},
		"the server's certificate has expired":   {"localhost", "sslmode=verify-full&sslrootcert=" + ca, old, oldKey, "certificate has expired"},
		"the server does not take plain text":    {"localhost", "sslmode=disable", good, goodKey, "pg_hba.conf rejects connection"},
		"verify-ca does not look at the name":    {"127.0.0.1", "sslmode=verify-ca&sslrootcert=" + ca, good, goodKey, ""},
		"require looks at neither name nor file": {"127.0.0.1", "sslmode=require", good, goodKey, ""},
	} {
		t.Run(name, func(t *testing.T) {
			useTLS(t, pg, right, tc.cert, tc.key, onlyEncrypted)
			c := newConnector(t, secureDSN(t, pg, tc.host, tc.query), rabbittest.URL(t), rabbittest.Name(t))
			failed, output := c.check()
			var text string
			for _, f := range failed {
				if f.Check == "PostgreSQL" {
					text = f.Text
				}
			}
			if (text == "") != (tc.says == "") || !strings.Contains(text, tc.says) {
				t.Errorf("check says %q, want %q:\n%s", text, tc.says, output)
			}
			if strings.Contains(output, "top-secret") {
				t.Error("check shows the password")
			}
			t.Logf("%s", text)
		})
	}

	useTLS(t, pg, right, old, oldKey, onlyEncrypted)
	c := newConnector(t, admin, rabbittest.URL(t), rabbittest.Name(t))
	c.must("init", "--create-table")
	pgtest.Exec(t, admin, "GRANT SELECT ON outbox TO relay")
	c.env["CDCPUB_SOURCE_DSN"] = secureDSN(t, pg, "localhost", "sslmode=verify-full&sslrootcert="+ca)
	c.start()
	eventually(t, 20*time.Second, "run waits and says why", func() bool {
		s := c.status()
		return s.State == "waiting" && strings.Contains(s.Reason, "certificate has expired")
	})
	useTLS(t, pg, right, good, goodKey, onlyEncrypted)
	eventually(t, time.Minute, "run goes on", func() bool { s := c.status(); return s.Ready && s.State == "streaming" })
	c.stop()
	log, err := os.ReadFile(c.log.Name())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(log), "top-secret") {
		t.Error("the log shows the password")
	}
}

// Instead of a password, the role may show a certificate.
func TestTheRoleLogsInWithACertificate(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, "private authority")
	dir := t.TempDir()
	pg := pgtest.Start(t)
	admin := pg.DSN("postgres")
	pgtest.Exec(t, admin, "CREATE ROLE relay LOGIN REPLICATION")
	cert, key := a.issue("localhost", 2*time.Hour)
	useTLS(t, pg, a, cert, key, "hostssl all relay all cert\nhostnossl all relay all reject\n")
	mine, private := a.issue("relay", 2*time.Hour)
	query := url.Values{"sslmode": {"verify-full"}, "sslrootcert": {writeFile(t, filepath.Join(dir, "ca.pem"), a.pem())},
		"sslcert": {writeFile(t, filepath.Join(dir, "relay.crt"), mine)}, "sslkey": {writeFile(t, filepath.Join(dir, "relay.key"), private)}}
	c := newConnector(t, admin, rabbittest.URL(t), rabbittest.Name(t))
	c.must("init", "--create-table")
	pgtest.Exec(t, admin, "GRANT SELECT ON outbox TO relay")
	_, port, _ := strings.Cut(pg.Addr(), ":")
	c.env["CDCPUB_SOURCE_DSN"] = fmt.Sprintf("postgres://relay@localhost:%s/postgres?%s", port, query.Encode())
	c.streamOnce()
	c.env["CDCPUB_SOURCE_DSN"] = admin
	c.must("teardown", "--yes")
}
