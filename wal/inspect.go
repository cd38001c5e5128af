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
	Version         string      // of the server, as it prints it
	WALLevel        string
	InRecovery      bool
	SyncStandbys    string // synchronous_standby_names
	Slot            *Slot
	Publication     *Publication
	Tables          []TableState
	ApplicationName string // of our own session, as synchronous_standby_names sees it
	Role            Role
	Admin           string // a superuser who can log in; empty where the provider keeps that for itself
	Provider        Provider
	Slots           Limit // max_replication_slots
	Senders         Limit // max_wal_senders, our own session included
	// Standbys are the names of the connected standbys; nil if our role may not
	// see all of them.
	Standbys []string
}

// Role is the role that the connector logs in as.
type Role struct {
	Name        string
	Replication bool // it may read from a slot
}

// Limit is a number of places, and how many are taken.
type Limit struct{ Used, Max int }

// Full reports whether no place is left.
func (l Limit) Full() bool { return l.Used >= l.Max }

// Provider is a service that runs PostgreSQL for others, and has its own ways for
// what a superuser does elsewhere.
type Provider string

// The providers that are told by the roles they make.
const (
	SelfHosted Provider = ""
	AmazonRDS  Provider = "Amazon RDS"
	CloudSQL   Provider = "Google Cloud SQL"
	Azure      Provider = "Azure Database for PostgreSQL"
)

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
	Owner   string
	Insert  bool
	ViaRoot bool
	Tables  []string // schema.name, as pg_publication_tables lists them
}

// TableState is what the catalogs say about one configured table.
type TableState struct {
	Name        string
	OID         uint32 // zero: does not exist
	Owner       string
	Kind        string // pg_class.relkind
	Rows        int64  // the planner's estimate; -1: never counted
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
	for _, step := range []func(context.Context, *Findings) error{c.identity, c.server, c.capacity, c.slot, c.publication, c.tables} {
		if err := step(ctx, &f); err != nil {
			return f, err
		}
	}
	return f, nil
}

func (c *Conn) identity(ctx context.Context, f *Findings) error {
	if c.replication == nil {
		return c.identityBySQL(ctx, f)
	}
	sys, err := pglogrepl.IdentifySystem(ctx, c.replication)
	if err != nil {
		return fmt.Errorf("identify PostgreSQL system: %w", err)
	}
	f.Source.SystemID, f.Source.Timeline, f.Source.Database = sys.SystemID, uint32(sys.Timeline), sys.DBName
	f.WALEnd = offsets.LSN(sys.XLogPos)
	return nil
}

// identityBySQL asks an ordinary session for what IDENTIFY_SYSTEM answers to a
// walsender. The timeline is the one that the server writes to: the control file
// still has the old one for a while after a promotion.
func (c *Conn) identityBySQL(ctx context.Context, f *Findings) error {
	rows, err := c.query(ctx, `SELECT system_identifier, current_database(),
		CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
			ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END,
		CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END
		FROM pg_control_system()`)
	if err != nil {
		return fmt.Errorf("identify PostgreSQL system: %w", err)
	}
	r := rows[0]
	timeline, err := strconv.ParseUint(*r[2], 10, 32)
	if err != nil {
		return fmt.Errorf("identify PostgreSQL system: %w", err)
	}
	f.Source.SystemID, f.Source.Database, f.Source.Timeline = *r[0], *r[1], uint32(timeline)
	if r[3] == nil { // a standby that has replayed nothing
		return nil
	}
	if f.WALEnd, err = offsets.ParseLSN(*r[3]); err != nil {
		return fmt.Errorf("identify PostgreSQL system: %w", err)
	}
	return nil
}

func (c *Conn) server(ctx context.Context, f *Findings) error {
	rows, err := c.query(ctx, `SELECT current_setting('wal_level'), pg_is_in_recovery(),
		current_setting('synchronous_standby_names'), current_setting('application_name'), current_setting('server_version'),
		current_user, rolsuper OR rolreplication OR EXISTS (
			SELECT FROM pg_roles g WHERE g.rolname = 'rds_replication' AND pg_has_role(current_user, g.oid, 'MEMBER'))
		FROM pg_roles WHERE rolname = current_user`)
	if err != nil {
		return fmt.Errorf("read server settings: %w", err)
	}
	r := rows[0]
	f.WALLevel, f.InRecovery, f.SyncStandbys, f.ApplicationName, f.Version = *r[0], *r[1] == "t", *r[2], *r[3], *r[4]
	f.Role = Role{Name: *r[5], Replication: *r[6] == "t"}
	return nil
}

// capacity asks what is left of the server's limits, and who may raise them.
func (c *Conn) capacity(ctx context.Context, f *Findings) error {
	rows, err := c.query(ctx, `SELECT current_setting('max_replication_slots'), (SELECT count(*) FROM pg_replication_slots),
		current_setting('max_wal_senders'), (SELECT count(*) FROM pg_stat_replication),
		(SELECT json_agg(application_name) FROM pg_stat_replication WHERE application_name <> current_setting('application_name')),
		(SELECT count(*) FROM pg_stat_replication WHERE application_name IS NULL),
		(SELECT rolname FROM pg_roles WHERE rolsuper AND rolcanlogin ORDER BY oid LIMIT 1),
		(SELECT min(rolname) FROM pg_roles WHERE rolname IN ('rds_superuser', 'cloudsqlsuperuser', 'azure_pg_admin'))`)
	if err != nil {
		return fmt.Errorf("read server limits: %w", err)
	}
	r := rows[0]
	for i, n := range []*int{&f.Slots.Max, &f.Slots.Used, &f.Senders.Max, &f.Senders.Used} {
		if *n, err = strconv.Atoi(*r[i]); err != nil {
			return fmt.Errorf("read server limits: %w", err)
		}
	}
	if *r[5] == "0" {
		f.Standbys = []string{}
	}
	if *r[5] == "0" && r[4] != nil {
		if err := json.Unmarshal([]byte(*r[4]), &f.Standbys); err != nil {
			return fmt.Errorf("read connected standbys: %w", err)
		}
	}
	if r[7] == nil {
		if r[6] != nil {
			f.Admin = *r[6]
		}
		return nil
	}
	f.Provider = map[string]Provider{"rds_superuser": AmazonRDS, "cloudsqlsuperuser": CloudSQL, "azure_pg_admin": Azure}[*r[7]]
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
	rows, err := c.query(ctx, `SELECT oid, pubinsert, pubviaroot, pg_get_userbyid(pubowner) FROM pg_publication WHERE pubname = `+literal(c.cfg.Publication))
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
	f.Publication = &Publication{OID: oid, Insert: *rows[0][1] == "t", ViaRoot: *rows[0][2] == "t", Owner: *rows[0][3]}
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
			has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'), row_security_active(c.oid),
			pg_get_userbyid(c.relowner), c.reltuples::bigint
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
	ts.Owner = *r[9]
	if ts.Rows, err = strconv.ParseInt(*r[10], 10, 64); err != nil {
		return ts, err
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
