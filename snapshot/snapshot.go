// Package snapshot publishes the rows that an outbox table held before its
// replication slot existed, as the same batches that the stream brings.
//
// The rows are those of one MVCC snapshot. The slot's exported snapshot sees
// exactly what committed before the slot's consistent point and the stream
// brings exactly the rest (PostgreSQL documentation, "Exported Snapshots" under
// logical decoding), so without a crash nothing comes twice. After a crash the
// exported snapshot is gone; a fresh one sees more, which the stream then brings
// again: duplicates, never a gap, as long as nobody deletes unpublished rows.
//
// Rows come in the order of SELECT ... ORDER BY, not of their commits: that
// order is known to the log alone.
package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

// DefaultChunkRows is how many rows are fetched from the server's cursor at once.
const DefaultChunkRows = 5000

const closeTimeout = 2 * time.Second

// Table is one table to read.
type Table struct {
	Name    string // schema.name
	Columns outbox.Columns
	// OrderBy names columns, mapped or not; empty: the mapped version, then the
	// event ID.
	OrderBy []string
}

// Config says what to read and under which snapshot.
type Config struct {
	// Server is an ordinary connection to the very server that has the slot: one
	// address and no fallbacks. A DSN of several hosts could lead to another one,
	// whose rows say nothing about what this slot will bring. It comes from
	// pgconn.ParseConfig, as pgconn demands, with what bounds connecting and
	// notices a dead host; Open copies it and sets the session's parameters in the
	// copy.
	Server *pgconn.Config
	Tables []Table // read one after the other
	// Exported is the snapshot to import; empty: a fresh one.
	Exported string
	// Point is the slot's consistent point. Every batch stands for it: however
	// many old rows are published, the slot must not move.
	Point     offsets.LSN
	ChunkRows int
}

// Source reads the rows. It is used like the stream: batches until the channel
// is closed, then Err.
type Source struct {
	cfg     Config
	conn    *pgconn.PgConn
	batches chan outbox.Batch
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // written before done is closed
	rows    atomic.Uint64
	close   sync.Once

	ordinal uint64
	batch   outbox.Batch
	bytes   int
}

// Open connects and takes the snapshot. When it returns, the snapshot is held by
// this session and the connection that exported it is free. The context is for
// opening alone: reading has no limit in time, since the server may sort for an
// hour before the first row.
func Open(ctx context.Context, cfg Config) (*Source, error) {
	if cfg.Server == nil {
		return nil, errors.New("open snapshot: no server is configured")
	}
	if cfg.Point.IsZero() || cfg.ChunkRows < 1 {
		return nil, fmt.Errorf("open snapshot: consistent point %s and chunk of %d rows: want both above zero", cfg.Point, cfg.ChunkRows)
	}
	conn, err := connect(ctx, cfg.Server)
	if err != nil {
		return nil, fmt.Errorf("open snapshot: %w", err)
	}
	if err := begin(ctx, conn, cfg); err != nil {
		closeConn(conn)
		return nil, fmt.Errorf("open snapshot: %w", err)
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Source{cfg: cfg, conn: conn, batches: make(chan outbox.Batch), cancel: cancel, done: make(chan struct{})}
	go s.run(run)
	return s, nil
}

// connect pins the settings that the text of a value depends on, as the stream
// does, and switches off what would end a long transaction.
func connect(ctx context.Context, server *pgconn.Config) (*pgconn.PgConn, error) {
	cfg := server.Copy()
	maps.Copy(cfg.RuntimeParams, outbox.TextSettings())
	maps.Copy(cfg.RuntimeParams, map[string]string{
		"application_name":                    "cdcpub snapshot",
		"lock_timeout":                        "30s",
		"statement_timeout":                   "0",
		"idle_in_transaction_session_timeout": "0",
		// The stream ignores row-level security. Reading fewer rows here would be
		// a silent gap; off makes it an error.
		"row_security": "off",
	})
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := prepare(ctx, conn); err != nil {
		closeConn(conn)
		return nil, err
	}
	return conn, nil
}

// prepare refuses a standby, and sets what the parameters of connect cannot.
func prepare(ctx context.Context, conn *pgconn.PgConn) error {
	// A standby replays what its primary did some time ago: a fresh snapshot there
	// could lack rows that committed before the consistent point.
	rows, err := query(ctx, conn, "SELECT pg_is_in_recovery()")
	if err != nil {
		return err
	}
	if string(rows[0][0]) == "t" {
		return errors.New("the server is a standby, which may lag behind the slot")
	}
	// PostgreSQL 17 has transaction_timeout; naming it at connect would be fatal
	// before.
	_, err = query(ctx, conn, "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'")
	return err
}

// query returns a statement's rows as text.
func query(ctx context.Context, conn *pgconn.PgConn, sql string, args ...string) ([][][]byte, error) {
	values := make([][]byte, len(args))
	for i, a := range args {
		values[i] = []byte(a)
	}
	result := conn.ExecParams(ctx, sql, values, nil, nil, nil).Read()
	return result.Rows, result.Err
}

// begin takes the snapshot and keeps the tables from being truncated or rewritten
// under it: that is not MVCC-safe, and an old snapshot would see an empty table
// (PostgreSQL documentation, "Caveats" of concurrency control).
func begin(ctx context.Context, conn *pgconn.PgConn, cfg Config) error {
	lock, err := lockTables(cfg.Tables)
	if err != nil {
		return err
	}
	sql := "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; "
	if cfg.Exported != "" {
		sql += "SET TRANSACTION SNAPSHOT '" + strings.ReplaceAll(cfg.Exported, "'", "''") + "'; " + lock
	} else {
		sql += lock + "; SELECT 1" // a snapshot is taken by the first query, not by BEGIN or LOCK
	}
	_, err = conn.Exec(ctx, sql).ReadAll()
	return err
}

func lockTables(tables []Table) (string, error) {
	names := make([]string, len(tables))
	for i, t := range tables {
		schema, name, err := outbox.ParseTable(t.Name)
		if err != nil {
			return "", err
		}
		names[i] = outbox.QuoteTable(schema, name)
	}
	return "LOCK TABLE " + strings.Join(names, ", ") + " IN ACCESS SHARE MODE", nil
}

func closeConn(conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = conn.Close(ctx) // says only that a connection we no longer want is gone
}

// Batches is closed after the last row or on an error. The receiver owns the
// batch.
func (s *Source) Batches() <-chan outbox.Batch { return s.batches }

// Ack does nothing: the slot stays where it is until the stream.
func (s *Source) Ack(offsets.LSN) {}

// Err says why the batches ended: nil after the last row or Close.
func (s *Source) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// Rows is the number of rows handed on so far. It may be called from any
// goroutine.
func (s *Source) Rows() uint64 { return s.rows.Load() }

// Close ends reading and waits for it. It may be called again.
func (s *Source) Close() {
	s.close.Do(s.cancel)
	<-s.done
}

func (s *Source) run(ctx context.Context) {
	err := s.read(ctx)
	if ctx.Err() != nil {
		err = nil // Close asked for it
	}
	s.err = err
	closeConn(s.conn)
	s.cancel()
	close(s.done)
	close(s.batches)
}

func (s *Source) read(ctx context.Context) error {
	for _, t := range s.cfg.Tables {
		if err := s.table(ctx, t); err != nil {
			return fmt.Errorf("read snapshot of %s: %w", t.Name, err)
		}
	}
	return s.handOver(ctx)
}

// table reads one table through a server-side cursor: the server sorts once, and
// memory here is bounded by a batch, whatever the size of a chunk.
func (s *Source) table(ctx context.Context, t Table) error {
	mapping, sql, err := s.plan(ctx, t)
	if err != nil {
		return err
	}
	if _, err := query(ctx, s.conn, "DECLARE cdcpub_rows NO SCROLL CURSOR FOR "+sql); err != nil {
		return err
	}
	fetch := fmt.Sprintf("FETCH %d FROM cdcpub_rows", s.cfg.ChunkRows)
	for {
		n, err := s.chunk(ctx, mapping, fetch)
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
	}
	_, err = query(ctx, s.conn, "CLOSE cdcpub_rows")
	return err
}

func (s *Source) chunk(ctx context.Context, mapping *outbox.Mapping, fetch string) (rows int, err error) {
	result := s.conn.ExecParams(ctx, fetch, nil, nil, nil, nil) // text results
	for result.NextRow() {
		rows++
		if err := s.add(ctx, mapping.Event(result.Values())); err != nil {
			_, _ = result.Close() // err is the cause of whatever it says
			return rows, err
		}
	}
	_, err = result.Close()
	return rows, err
}

func (s *Source) plan(ctx context.Context, t Table) (*outbox.Mapping, string, error) {
	schema, name, err := outbox.ParseTable(t.Name)
	if err != nil {
		return nil, "", err
	}
	quoted := outbox.QuoteTable(schema, name)
	cols, err := columns(ctx, s.conn, quoted)
	if err != nil {
		return nil, "", err
	}
	whole, err := outbox.Bind(t.Name, cols, t.Columns)
	if err != nil {
		return nil, "", err
	}
	order := t.OrderBy
	if len(order) == 0 {
		order = whole.OrderBy()
	}
	from, err := s.from(ctx, quoted)
	if err != nil {
		return nil, "", err
	}
	sql := "SELECT " + list(whole.Names()) + " FROM " + from + " ORDER BY " + list(order)
	return whole.Narrow(), sql, nil
}

// from leaves out tables that inherit from the outbox: the stream does not take
// their rows for events either. Partitions are the outbox itself.
func (s *Source) from(ctx context.Context, quoted string) (string, error) {
	rows, err := query(ctx, s.conn, "SELECT EXISTS (SELECT FROM pg_class WHERE oid = $1::text::regclass AND relkind = 'p')", quoted)
	if err != nil {
		return "", err
	}
	if string(rows[0][0]) == "t" {
		return quoted, nil
	}
	return "ONLY " + quoted, nil
}

func list(names []string) string {
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = outbox.QuoteIdentifier(n)
	}
	return strings.Join(quoted, ", ")
}

// columns leaves out what the stream does not carry either. Generated columns are
// in no stream up to PostgreSQL 17 and by default in none after ("Generated Column
// Replication"): mapped here, the same row would be two different messages.
func columns(ctx context.Context, conn *pgconn.PgConn, quoted string) ([]outbox.Column, error) {
	rows, err := query(ctx, conn, `SELECT attname, atttypid FROM pg_attribute
		WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum`, quoted)
	if err != nil {
		return nil, err
	}
	cols := make([]outbox.Column, len(rows))
	for i, r := range rows {
		oid, err := strconv.ParseUint(string(r[1]), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("read type of column %s: %w", r[0], err)
		}
		cols[i] = outbox.Column{Name: string(r[0]), Type: uint32(oid)}
	}
	return cols, nil
}

func (s *Source) add(ctx context.Context, e outbox.Event) error {
	s.ordinal++
	e.Origin = outbox.OriginSnapshot
	// One below the consistent point, so that it sorts before every streamed
	// event: a commit record may begin exactly at that point.
	e.Position = offsets.Position{LSN: s.cfg.Point, Tx: s.cfg.Point - 1, Done: s.ordinal, Last: offsets.Row{Table: e.Table, ID: e.ID}}
	size := e.Size()
	if len(s.batch.Events) > 0 && (len(s.batch.Events) >= outbox.MaxBatchEvents || s.bytes+size > outbox.MaxBatchBytes) {
		if err := s.handOver(ctx); err != nil {
			return err
		}
	}
	s.batch.Events = append(s.batch.Events, e)
	s.bytes += size
	return nil
}

func (s *Source) handOver(ctx context.Context) error {
	if len(s.batch.Events) == 0 {
		return nil
	}
	s.batch.Through = offsets.Position{LSN: s.cfg.Point}
	select {
	case s.batches <- s.batch:
		s.rows.Add(uint64(len(s.batch.Events)))
		s.batch, s.bytes = outbox.Batch{}, 0
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
