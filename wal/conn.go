package wal

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/internal/tcp"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

const (
	// senderTimeout is set as wal_sender_timeout on our session, whatever the
	// server's default: it bounds how long the slot of a vanished connector stays
	// taken.
	senderTimeout = 20 * time.Second
	// slotLockTimeout bounds how long CREATE_REPLICATION_SLOT waits for one
	// running transaction to end. lock_timeout is the only timeout that applies to
	// that wait and tears the half-made slot down.
	slotLockTimeout = 30 * time.Second
	connectTimeout  = 10 * time.Second
)

// Table is one outbox table of the stream.
type Table struct {
	Name    string // schema.name
	Columns outbox.Columns
}

// Config says what to read and from where.
type Config struct {
	// DSN is a libpq URL or keyword string. Several hosts and
	// target_session_attrs work as in libpq.
	DSN string
	// Renew, if set, is asked for the DSN instead, before every connection: its
	// password may have been changed meanwhile.
	Renew       func() (string, error)
	Slot        string // [a-z0-9_]{1,63}
	Publication string
	Tables      []Table
}

var slotName = regexp.MustCompile(`^[a-z0-9_]{1,63}$`)

// ValidSlotName is PostgreSQL's own rule (ReplicationSlotValidateName), for those
// who cannot wait until the server complains at the slot's creation.
func ValidSlotName(s string) bool { return slotName.MatchString(s) }

// Conn is a connection that does not stream yet. It is not safe for concurrent
// use.
type Conn struct {
	cfg Config
	// sql runs every statement, and replication none at all. A statement loads
	// the catalogs as they are now into the session's cache, and a walsender that
	// has them there decodes older rows by them: seen on PostgreSQL 17, where a row
	// from before an ADD COLUMN had the new column, and TOAST was looked for in a
	// table that did not exist yet (ADR 0006).
	sql         *pgconn.PgConn
	replication *pgconn.PgConn // nil if there is none, and after Start
	params      *pgconn.Config
	// skippedPublication is set when PostgreSQL 18 reports "skipped loading
	// publication", a mere warning after which rows pass silently unpublished.
	skippedPublication *atomic.Bool
}

// sessionParams make the session a walsender and pin its timeouts and what the
// meaning of our own SQL depends on.
func sessionParams() map[string]string {
	return map[string]string{
		"replication":                         "database",
		"application_name":                    "cdcpub",
		"wal_sender_timeout":                  fmt.Sprint(senderTimeout.Milliseconds()),
		"standard_conforming_strings":         "on",
		"client_min_messages":                 "warning",
		"lock_timeout":                        fmt.Sprint(slotLockTimeout.Milliseconds()),
		"statement_timeout":                   "0",
		"idle_in_transaction_session_timeout": "0",
	}
}

// Connect opens a replication connection. A role without REPLICATION is a
// *Refusal. Errors never contain the password.
func Connect(ctx context.Context, cfg Config) (*Conn, error) {
	c, conn, err := open(ctx, cfg, sessionParams())
	if sqlState(err) == "42501" { // insufficient_privilege
		return nil, noSender(ctx, cfg, err)
	}
	if err != nil {
		return nil, err
	}
	c.replication = conn
	if c.sql, err = pgconn.ConnectConfig(ctx, c.Sibling()); err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return c, nil
}

// noSender tells a role that may not replicate from one that may not connect at
// all: both have the same code, and the text differs between versions and
// languages.
func noSender(ctx context.Context, cfg Config, err error) error {
	c, sqlErr := ConnectSQL(ctx, cfg)
	if sqlErr != nil {
		return err
	}
	defer c.Close()
	found, sqlErr := c.Inspect(ctx)
	if sqlErr != nil {
		return err
	}
	if r := first(found.role()); r != nil {
		return r
	}
	return err
}

// ConnectSQL opens an ordinary connection, for those who look and set up: it
// takes neither the REPLICATION attribute nor a walsender. CreateSlot, DropSlot
// and Start fail on it.
func ConnectSQL(ctx context.Context, cfg Config) (*Conn, error) {
	params := sessionParams()
	delete(params, "replication")
	delete(params, "wal_sender_timeout")
	c, conn, err := open(ctx, cfg, params)
	if err != nil {
		return nil, err
	}
	c.sql = conn
	return c, nil
}

func open(ctx context.Context, cfg Config, params map[string]string) (*Conn, *pgconn.PgConn, error) {
	if !ValidSlotName(cfg.Slot) {
		return nil, nil, fmt.Errorf("connect to PostgreSQL: slot name %q: want 1 to 63 of a-z, 0-9 and _", cfg.Slot)
	}
	pc, err := cfg.parse()
	if err != nil {
		return nil, nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	maps.Copy(pc.RuntimeParams, outbox.TextSettings())
	maps.Copy(pc.RuntimeParams, params)
	if pc.ConnectTimeout == 0 {
		pc.ConnectTimeout = connectTimeout
	}
	pc.DialFunc = tcp.NewDialer().DialContext
	c := &Conn{cfg: cfg, params: pc, skippedPublication: &atomic.Bool{}}
	pc.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		// PostgreSQL 18 src/backend/replication/pgoutput/pgoutput.c,
		// LoadPublications. The code, because the text is translated.
		if n.Code == "55000" {
			c.skippedPublication.Store(true)
		}
	}
	conn, err := pgconn.ConnectConfig(ctx, pc)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return c, conn, nil
}

func (c Config) parse() (*pgconn.Config, error) {
	dsn := c.DSN
	if c.Renew != nil {
		var err error
		if dsn, err = c.Renew(); err != nil {
			return nil, err
		}
	}
	return pgconn.ParseConfig(dsn)
}

// Close ends the connections. What Start has handed on stays: the Stream owns it.
func (c *Conn) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for _, conn := range []**pgconn.PgConn{&c.replication, &c.sql} {
		if *conn != nil {
			// Its error would say only that a connection we no longer want is gone.
			_ = (*conn).Close(ctx)
			*conn = nil
		}
	}
}

// Sibling is the configuration of an ordinary connection to the very server that
// c leads to, in the way in which it was reached: of several hosts in a DSN
// another one may be a standby that lags, or another server altogether. It must
// be asked for before Start. The caller owns it.
func (c *Conn) Sibling() *pgconn.Config {
	cfg := c.params.Copy()
	// Our walsender may be the last that is allowed.
	delete(cfg.RuntimeParams, "replication")
	delete(cfg.RuntimeParams, "wal_sender_timeout")
	cfg.OnNotice, cfg.ValidateConnect, cfg.Fallbacks = nil, nil, nil
	reached := c.sql
	if c.replication != nil {
		reached = c.replication
	}
	if addr, ok := reached.Conn().RemoteAddr().(*net.TCPAddr); ok {
		cfg.Host, cfg.Port = addr.IP.String(), uint16(addr.Port)
	}
	if _, encrypted := reached.Conn().(*tls.Conn); !encrypted {
		cfg.TLSConfig = nil
	}
	return cfg
}

// byOID finds the configuration of each table.
func (c Config) byOID(tables []offsets.Table) map[uint32]Table {
	m := make(map[uint32]Table, len(tables))
	for _, id := range tables {
		for _, t := range c.Tables {
			if t.Name == id.Name {
				m[id.OID] = t
			}
		}
	}
	return m
}

// query runs one statement by the simple protocol and returns its rows as text.
func (c *Conn) query(ctx context.Context, sql string) ([][]*string, error) {
	results, err := c.sql.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) == 0 {
		return nil, errors.New("no result")
	}
	rows := make([][]*string, 0, len(results[0].Rows))
	for _, values := range results[0].Rows {
		row := make([]*string, len(values))
		for i, v := range values {
			if v != nil {
				s := string(v)
				row[i] = &s
			}
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// literal quotes s for SQL; standard_conforming_strings is pinned on.
func literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// sqlState returns err's SQLSTATE, or "".
func sqlState(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}
