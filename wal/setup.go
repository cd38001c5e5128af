package wal

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pglogrepl"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

// PublicationSQL is the statement that makes the publication. Inserts only: the
// application may update and delete outbox rows without a replica identity. Via
// the partition root: new partitions need no configuration.
func PublicationSQL(cfg Config) (string, error) {
	names := make([]string, len(cfg.Tables))
	for i, t := range cfg.Tables {
		schema, rel, err := outbox.ParseTable(t.Name)
		if err != nil {
			return "", err
		}
		names[i] = outbox.QuoteTable(schema, rel)
	}
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s\n    WITH (publish = 'insert', publish_via_partition_root = true)",
		outbox.QuoteIdentifier(cfg.Publication), strings.Join(names, ", ")), nil
}

// CreatePublication makes the publication. It must exist before the slot: a
// slot decodes with the catalogs as they were at each point of the log.
func (c *Conn) CreatePublication(ctx context.Context) error {
	sql, err := PublicationSQL(c.cfg)
	if err != nil {
		return fmt.Errorf("create publication: %w", err)
	}
	if _, err := c.query(ctx, sql); err != nil {
		return fmt.Errorf("create publication %q: %w", c.cfg.Publication, err)
	}
	return nil
}

// Exec runs SQL statements that return nothing of interest.
func (c *Conn) Exec(ctx context.Context, sql string) error {
	_, err := c.sql.Exec(ctx, sql).ReadAll()
	return err
}

// DropPublication drops the publication if it exists.
func (c *Conn) DropPublication(ctx context.Context) error {
	if err := c.Exec(ctx, "DROP PUBLICATION IF EXISTS "+outbox.QuoteIdentifier(c.cfg.Publication)); err != nil {
		return fmt.Errorf("drop publication %q, which takes its owner: %w", c.cfg.Publication, err)
	}
	return nil
}

// DropSlot drops the replication slot. A slot that does not exist is not an
// error.
func (c *Conn) DropSlot(ctx context.Context) error {
	if c.replication == nil {
		return fmt.Errorf("drop replication slot %q: %w", c.cfg.Slot, errNoReplication)
	}
	err := pglogrepl.DropReplicationSlot(ctx, c.replication, c.cfg.Slot, pglogrepl.DropReplicationSlotOptions{})
	if err != nil && sqlState(err) != "42704" {
		return fmt.Errorf("drop replication slot %q: %w", c.cfg.Slot, err)
	}
	return nil
}

// CreatedSlot is a new slot with its exported snapshot.
type CreatedSlot struct {
	ConsistentPoint offsets.LSN
	// Snapshot sees exactly the transactions that committed before
	// ConsistentPoint. It lives until the next of CreateSlot, DropSlot, Inspect
	// and Start: import it before.
	Snapshot string
}

// CreateSlot makes the slot and exports its snapshot. It waits for the
// transactions that are running to end, each for at most 30 s; a *Refusal names
// the one that did not.
func (c *Conn) CreateSlot(ctx context.Context) (CreatedSlot, error) {
	if c.replication == nil {
		return CreatedSlot{}, fmt.Errorf("create replication slot %q: %w", c.cfg.Slot, errNoReplication)
	}
	res, err := pglogrepl.CreateReplicationSlot(ctx, c.replication, c.cfg.Slot, "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{Mode: pglogrepl.LogicalReplication, SnapshotAction: "EXPORT_SNAPSHOT"})
	if err != nil {
		return CreatedSlot{}, c.slotError(ctx, err)
	}
	lsn, err := offsets.ParseLSN(res.ConsistentPoint)
	if err != nil {
		return CreatedSlot{}, fmt.Errorf("create replication slot %q: %w", c.cfg.Slot, err)
	}
	return CreatedSlot{ConsistentPoint: lsn, Snapshot: res.SnapshotName}, nil
}

func (c *Conn) slotError(ctx context.Context, err error) error {
	switch sqlState(err) {
	case "55P03": // lock_not_available: our lock_timeout
		return refuse(Setup, "end it, or wait: the slot can only be created once it has ended",
			"creating replication slot %q waits for %s", c.cfg.Slot, c.blocker(ctx))
	case "42710": // duplicate_object
		return refuse(Gap, "set source.slot to a name of its own", "replication slot %q was created by somebody else just now", c.cfg.Slot)
	case "42501": // insufficient_privilege
		return refuse(Setup, "run as a superuser: ALTER ROLE <role> REPLICATION", "create replication slot %q: %v", c.cfg.Slot, err)
	case "53400": // configuration_limit_exceeded
		return refuse(Setup, "raise max_replication_slots and restart PostgreSQL, or drop a slot that nobody uses", "create replication slot %q: %v", c.cfg.Slot, err)
	default:
		return fmt.Errorf("create replication slot %q: %w", c.cfg.Slot, err)
	}
}

// blocker names the oldest transaction that slot creation can be waiting for. State
// and age of other roles' sessions are hidden from a role without pg_monitor.
func (c *Conn) blocker(ctx context.Context) string {
	rows, err := c.query(ctx, `SELECT what FROM (
		SELECT xact_start AS since, format('the transaction of process %s (%s)', pid, concat_ws(', ',
			coalesce(nullif(application_name, ''), 'no application name'), state, 'open for ' || date_trunc('second', now() - xact_start))) AS what
		FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
		UNION ALL
		SELECT prepared, format('the prepared transaction %L (open for %s)', gid, date_trunc('second', now() - prepared)) FROM pg_prepared_xacts
	) t ORDER BY since LIMIT 1`)
	if err != nil || len(rows) == 0 {
		return "a transaction that has ended meanwhile"
	}
	return *rows[0][0]
}

// startError tells a slot that cannot be streamed from apart from a failure
// worth retrying.
func (c *Conn) startError(err error) error {
	switch sqlState(err) {
	case "55006": // object_in_use
		return refuse(SlotBusy, busyHint, "start replication: %v", err)
	case "42704", "55000", "58P01": // no such slot; invalidated; WAL segment removed
		return refuse(SlotLost, recoverHint, "start replication: %v", err)
	default:
		return fmt.Errorf("start replication from slot %q: %w", c.cfg.Slot, err)
	}
}
