package wal

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pglogrepl"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

// Findings is what a start found out about the server, before it changed
// anything.
type Findings struct {
	Source          offsets.Source
	WALEnd          offsets.LSN // flushed end of the server's WAL
	WALLevel        string
	InRecovery      bool
	SyncStandbys    string // synchronous_standby_names
	Slot            *Slot
	Publication     *Publication
	Tables          []TableState
	ApplicationName string // of our own session, as synchronous_standby_names sees it
}

// Slot is the row of pg_replication_slots. It is read as JSON, so that one query
// serves all versions: columns that a version lacks stay zero.
type Slot struct {
	Plugin             string       `json:"plugin"`
	Type               string       `json:"slot_type"`
	Database           string       `json:"database"`
	Temporary          bool         `json:"temporary"`
	TwoPhase           bool         `json:"two_phase"`
	Active             bool         `json:"active"`
	ActivePID          int          `json:"active_pid"`
	ConfirmedFlush     *offsets.LSN `json:"confirmed_flush_lsn"`
	WALStatus          string       `json:"wal_status"`
	Conflicting        bool         `json:"conflicting"`         // 16+
	InvalidationReason string       `json:"invalidation_reason"` // 17+
}

// Publication is the row of pg_publication and the names it publishes.
type Publication struct {
	OID     uint32
	Insert  bool
	ViaRoot bool
	Tables  []string // schema.name, as pg_publication_tables lists them
}

// TableState is what the catalogs say about one configured table.
type TableState struct {
	Name        string
	OID         uint32 // zero: does not exist
	Kind        string // pg_class.relkind
	Persistence string // pg_class.relpersistence
	RelOID      uint32 // pg_publication_rel.oid; zero: not there by name
	RowFilter   bool   // 15+
	ColumnList  bool   // 15+
	Published   bool
	Selectable  bool            // our role may read it, which only a snapshot needs
	RowSecurity bool            // a policy would hide rows from our role
	Columns     []outbox.Column // without generated ones, which the stream lacks
}

// scope hashes the configuration that decides which rows are events and how
// they count.
func (c Config) scope() string {
	tables := slices.SortedFunc(slices.Values(c.Tables), func(a, b Table) int { return strings.Compare(a.Name, b.Name) })
	b, err := json.Marshal(tables)
	if err != nil {
		panic(fmt.Sprintf("marshal table configuration: %v", err)) // strings only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// Inspect asks the server everything that a start decides on. It changes
// nothing.
func (c *Conn) Inspect(ctx context.Context) (Findings, error) {
	f := Findings{Source: offsets.Source{Slot: c.cfg.Slot, Publication: c.cfg.Publication, Scope: c.cfg.scope()}}
	sys, err := pglogrepl.IdentifySystem(ctx, c.pg)
	if err != nil {
		return f, fmt.Errorf("identify PostgreSQL system: %w", err)
	}
	f.Source.SystemID, f.Source.Timeline, f.Source.Database = sys.SystemID, uint32(sys.Timeline), sys.DBName
	f.WALEnd = offsets.LSN(sys.XLogPos)
	for _, step := range []func(context.Context, *Findings) error{c.server, c.slot, c.publication, c.tables} {
		if err := step(ctx, &f); err != nil {
			return f, err
		}
	}
	return f, nil
}

func (c *Conn) server(ctx context.Context, f *Findings) error {
	rows, err := c.query(ctx, `SELECT current_setting('wal_level'), pg_is_in_recovery(),
		current_setting('synchronous_standby_names'), current_setting('application_name')`)
	if err != nil {
		return fmt.Errorf("read server settings: %w", err)
	}
	r := rows[0]
	f.WALLevel, f.InRecovery, f.SyncStandbys, f.ApplicationName = *r[0], *r[1] == "t", *r[2], *r[3]
	return nil
}

func (c *Conn) slot(ctx context.Context, f *Findings) error {
	rows, err := c.query(ctx, `SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = `+literal(c.cfg.Slot))
	if err != nil {
		return fmt.Errorf("read replication slot: %w", err)
	}
	if len(rows) == 0 {
		return nil
	}
	f.Slot = &Slot{}
	if err := json.Unmarshal([]byte(*rows[0][0]), f.Slot); err != nil {
		return fmt.Errorf("read replication slot: %w", err)
	}
	return nil
}

func (c *Conn) publication(ctx context.Context, f *Findings) error {
	rows, err := c.query(ctx, `SELECT oid, pubinsert, pubviaroot FROM pg_publication WHERE pubname = `+literal(c.cfg.Publication))
	if err != nil {
		return fmt.Errorf("read publication: %w", err)
	}
	if len(rows) == 0 {
		return nil
	}
	oid, err := parseOID(rows[0][0])
	if err != nil {
		return fmt.Errorf("read publication: %w", err)
	}
	f.Publication = &Publication{OID: oid, Insert: *rows[0][1] == "t", ViaRoot: *rows[0][2] == "t"}
	f.Source.PublicationOID = oid
	rows, err = c.query(ctx, `SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = `+
		literal(c.cfg.Publication)+` ORDER BY 1`)
	if err != nil {
		return fmt.Errorf("read publication tables: %w", err)
	}
	for _, r := range rows {
		f.Publication.Tables = append(f.Publication.Tables, *r[0])
	}
	return nil
}

func (c *Conn) tables(ctx context.Context, f *Findings) error {
	for _, t := range c.cfg.Tables {
		ts, err := c.table(ctx, t.Name)
		if err != nil {
			return fmt.Errorf("read table %s: %w", t.Name, err)
		}
		f.Tables = append(f.Tables, ts)
		f.Source.Tables = append(f.Source.Tables, offsets.Table{Name: t.Name, OID: ts.OID, PublicationRel: ts.RelOID})
	}
	// Their order in the configuration means nothing, so it must not look like a
	// change.
	slices.SortFunc(f.Source.Tables, func(a, b offsets.Table) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

func (c *Conn) table(ctx context.Context, name string) (TableState, error) {
	ts := TableState{Name: name}
	schema, rel, err := outbox.ParseTable(name)
	if err != nil {
		return ts, err
	}
	rows, err := c.query(ctx, `SELECT c.oid, c.relkind, c.relpersistence, r.oid, to_jsonb(r)->>'prqual' IS NOT NULL, to_jsonb(r)->>'prattrs' IS NOT NULL,
			EXISTS (SELECT FROM pg_publication_tables t
				WHERE t.pubname = `+literal(c.cfg.Publication)+` AND t.schemaname = n.nspname AND t.tablename = c.relname),
			has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'), row_security_active(c.oid)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN (pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid AND p.pubname = `+literal(c.cfg.Publication)+`)
			ON r.prrelid = c.oid
		WHERE n.nspname = `+literal(schema)+` AND c.relname = `+literal(rel))
	if err != nil || len(rows) == 0 {
		return ts, err
	}
	r := rows[0]
	if ts.OID, err = parseOID(r[0]); err != nil {
		return ts, err
	}
	ts.Kind, ts.Persistence = *r[1], *r[2]
	if ts.RelOID, err = parseOID(r[3]); err != nil {
		return ts, err
	}
	for i, b := range []*bool{&ts.RowFilter, &ts.ColumnList, &ts.Published, &ts.Selectable, &ts.RowSecurity} {
		*b = *r[4+i] == "t"
	}
	rows, err = c.query(ctx, fmt.Sprintf(`SELECT attname, atttypid FROM pg_attribute
		WHERE attrelid = %d AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum`, ts.OID))
	if err != nil {
		return ts, err
	}
	for _, r := range rows {
		typ, err := parseOID(r[1])
		if err != nil {
			return ts, err
		}
		ts.Columns = append(ts.Columns, outbox.Column{Name: *r[0], Type: typ})
	}
	return ts, nil
}

// parseOID reads an OID; NULL is zero.
func parseOID(s *string) (uint32, error) {
	if s == nil {
		return 0, nil
	}
	v, err := strconv.ParseUint(*s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("parse OID: %w", err)
	}
	return uint32(v), nil
}
