package main

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sys/unix"

	"github.com/cdcpub/cdcpub/offsets"
)

// oldRows says how many rows go out before the stream starts and in which order,
// and where they go.
func (c *sourceCheck) oldRows(ctx context.Context, server *pgconn.Config, saved offsets.Checkpoint) []destination {
	// Once the stream goes on, run no longer reads old rows.
	refused := saved.Phase != offsets.PhaseStreaming && c.problems(aboutOldRows, c.cfg.oldRowProblems(c.found))
	if refused || c.failedTables() {
		return nil
	}
	s, err := openScan(ctx, c.cfg, server)
	if err != nil {
		c.add(levelUnknown, aboutOldRows, "%v", err)
		return nil
	}
	defer s.close(ctx)
	for i, t := range c.found.Tables {
		if !t.Selectable || t.RowSecurity {
			c.add(levelUnknown, aboutOldRows, "role %s may not read %s, so nothing can be said of its rows", c.found.Role.Name, t.Name)
			continue
		}
		count, err := s.rows(ctx, t)
		if err != nil {
			c.add(levelUnknown, aboutOldRows, "%v", err)
			continue
		}
		whole, err := s.table(ctx, i, t)
		if err != nil {
			c.add(levelUnknown, aboutOldRows, "look through %s: %v", t.Name, err)
			continue
		}
		c.tellRows(i, count, whole, saved)
	}
	return s.destinations()
}

// failedTables reports whether a table cannot be read as an outbox at all.
func (c *sourceCheck) failedTables() bool {
	for _, f := range c.findings {
		if f.Level == levelFail && strings.HasPrefix(f.Name, "table ") {
			return true
		}
	}
	return false
}

func (c *sourceCheck) tellRows(i int, count string, whole bool, saved offsets.Checkpoint) {
	t := c.found.Tables[i]
	note := ""
	if !whole {
		note = "; too many to look at all, so there may be more exchanges than those below"
	}
	order, known := c.cfg.orderOf(i, t)
	by := strings.Join(order, ", ")
	switch {
	case saved.Phase == offsets.PhaseStreaming:
		c.add(levelOK, aboutOldRows, "%s has %s rows; those older than the slot are published or left out already%s", t.Name, count, note)
	case c.cfg.Snapshot.Mode != "initial":
		c.add(levelOK, aboutOldRows, "the %s rows in %s are left out, since snapshot.mode is %s%s", count, t.Name, c.cfg.Snapshot.Mode, note)
	case !known && count != "0":
		c.findings = append(c.findings, finding{Name: aboutOldRows, Level: levelWarn,
			Text: "run first publishes the " + count + " rows of " + t.Name + " in the order of " + by + note,
			Note: "that is the order of keys, not of commits: name a column that follows the order of writing in snapshot.order_by, or old events of one aggregate may arrive in any order"})
	default:
		c.add(levelOK, aboutOldRows, "run first publishes the %s rows of %s in the order of %s%s", count, t.Name, by, note)
	}
}

func mayWrite(dir string) bool { return unix.Access(dir, unix.W_OK|unix.X_OK) == nil }
