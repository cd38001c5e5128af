package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
	"github.com/cdcpub/cdcpub/wal"
)

const (
	// scanTimeout bounds what looking through the rows of a table may cost a
	// database that has other work.
	scanTimeout = "10s"
	// sampleRows are looked at where the whole table takes too long.
	sampleRows = 1000
	// manyRows is where counting gives way to the planner's estimate.
	manyRows = 1_000_000
	maxKeys  = 3
)

// destination is where rows of the outbox tables go by the current
// configuration.
type destination struct {
	Exchange string
	Keys     []string // a few of the routing keys that were seen, at most 3
	Rows     int      // that were looked at
}

// scan looks through the rows that are in the outbox tables.
type scan struct {
	conn   *pgconn.PgConn
	cfg    Config
	router *router.Router
	seen   map[string]*destination
}

// openScan connects to the very server that was inspected. The scan has to be
// closed.
func openScan(ctx context.Context, cfg Config, server *pgconn.Config) (*scan, error) {
	rt, err := cfg.router()
	if err != nil {
		return nil, err
	}
	server = server.Copy()
	server.RuntimeParams["application_name"] = "cdcpub check"
	server.RuntimeParams["statement_timeout"] = scanTimeout
	server.RuntimeParams["default_transaction_read_only"] = "on"
	conn, err := pgconn.ConnectConfig(ctx, server)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return &scan{conn: conn, cfg: cfg, router: rt, seen: map[string]*destination{}}, nil
}

func (s *scan) close(ctx context.Context) { _ = s.conn.Close(ctx) } // it has only read

// destinations lists where the rows go that were looked at, by exchange.
func (s *scan) destinations() []destination {
	list := make([]destination, 0, len(s.seen))
	for _, d := range s.seen {
		list = append(list, *d)
	}
	slices.SortFunc(list, func(a, b destination) int { return cmp.Compare(a.Exchange, b.Exchange) })
	return list
}

// table routes one row of each kind that t holds. Kinds are told apart by the
// columns that exchanges are usually made of; where that takes too long, a part
// of the rows has to do. It reports whether it has seen the whole table.
func (s *scan) table(ctx context.Context, i int, t wal.TableState) (whole bool, err error) {
	m, err := outbox.Bind(t.Name, t.Columns, s.cfg.Source.Tables[i].Columns.columns())
	if err != nil {
		return false, err
	}
	var columns []string
	for _, name := range m.Names() {
		columns = append(columns, outbox.QuoteIdentifier(name))
	}
	var kinds []string
	for _, name := range m.KindColumns() {
		kinds = append(kinds, outbox.QuoteIdentifier(name))
	}
	schema, name, err := outbox.ParseTable(t.Name)
	if err != nil {
		return false, err
	}
	from := " FROM " + outbox.QuoteTable(schema, name)
	sample := fmt.Sprintf("SELECT %s%s LIMIT %d", strings.Join(columns, ", "), from, sampleRows)
	if !kindsDecide(s.cfg.Router.Exchange) {
		n, err := s.route(ctx, m.Narrow(), sample)
		return n < sampleRows, err
	}
	_, err = s.route(ctx, m.Narrow(), fmt.Sprintf("SELECT DISTINCT ON (%s) %s%s", strings.Join(kinds, ", "), strings.Join(columns, ", "), from))
	if !timedOut(err) {
		return err == nil, err
	}
	_, err = s.route(ctx, m.Narrow(), sample)
	return false, err
}

// kindsDecide reports whether the exchange depends on the columns of
// Mapping.KindColumns alone.
func kindsDecide(exchange string) bool {
	for _, name := range regexp.MustCompile(`\{[^{}]*\}`).FindAllString(exchange, -1) {
		if !slices.Contains([]string{"{aggregate_type}", "{type}", "{tenant}", "{schema_version}"}, name) {
			return false
		}
	}
	return true
}

// route notes where the rows of a query go and counts them.
func (s *scan) route(ctx context.Context, m *outbox.Mapping, sql string) (n int, err error) {
	result := s.conn.ExecParams(ctx, sql, nil, nil, nil, nil)
	for result.NextRow() {
		n++
		e := m.Event(result.Values())
		msg, err := s.router.Route(&e)
		if err != nil {
			continue // run says so when it meets the row
		}
		d := s.seen[msg.Exchange]
		if d == nil {
			d = &destination{Exchange: msg.Exchange}
			s.seen[msg.Exchange] = d
		}
		d.Rows++
		if len(d.Keys) < maxKeys && !slices.Contains(d.Keys, msg.RoutingKey) {
			d.Keys = append(d.Keys, msg.RoutingKey)
		}
	}
	_, err = result.Close()
	return n, err
}

// rows counts t's rows, or estimates many.
func (s *scan) rows(ctx context.Context, t wal.TableState) (string, error) {
	if t.Rows > manyRows {
		return fmt.Sprintf("about %d", t.Rows), nil
	}
	schema, name, err := outbox.ParseTable(t.Name)
	if err != nil {
		return "", err
	}
	result := s.conn.ExecParams(ctx, "SELECT count(*) FROM "+outbox.QuoteTable(schema, name), nil, nil, nil, nil).Read()
	switch {
	case timedOut(result.Err) && t.Rows > 0:
		return fmt.Sprintf("about %d", t.Rows), nil
	case timedOut(result.Err):
		return "an unknown number of", nil
	case result.Err != nil:
		return "", fmt.Errorf("count rows of %s: %w", t.Name, result.Err)
	}
	return string(result.Rows[0][0]), nil
}

func timedOut(err error) bool {
	var pe *pgconn.PgError
	return errors.As(err, &pe) && pe.Code == "57014" // query_canceled
}

// findDestinations looks through all outbox tables that are there, and reports
// whether it has seen all of their rows that matter.
func findDestinations(ctx context.Context, cfg Config) (found []destination, whole bool, err error) {
	conn, err := wal.ConnectSQL(ctx, cfg.walConfig())
	if err != nil {
		return nil, false, err
	}
	defer conn.Close()
	state, err := conn.Inspect(ctx)
	if err != nil {
		return nil, false, err
	}
	s, err := openScan(ctx, cfg, conn.Sibling())
	if err != nil {
		return nil, false, err
	}
	defer s.close(ctx)
	whole = true
	for i, t := range state.Tables {
		if t.OID == 0 {
			continue // without a table there are no rows
		}
		all, err := s.table(ctx, i, t)
		if err != nil {
			return nil, false, fmt.Errorf("look through %s for exchanges: %w", t.Name, err)
		}
		whole = whole && all
	}
	return s.destinations(), whole, nil
}
