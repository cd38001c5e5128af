package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
	"github.com/cdcpub/cdcpub/wal"
)

// The subjects of refusals that are about the configuration and the tables
// together.
const (
	aboutOldRows    = "old rows"
	aboutMessageIDs = "message IDs"
)

// oldRowProblems lists the tables whose old rows cannot be read, or not all, or
// not in the configured order.
func (c Config) oldRowProblems(f wal.Findings) []*wal.Refusal {
	if c.Snapshot.Mode != "initial" {
		return nil
	}
	var rs []*wal.Refusal
	role := outbox.QuoteIdentifier(f.Role.Name)
	for _, t := range f.Tables {
		if t.OID == 0 {
			continue
		}
		for _, name := range c.Snapshot.OrderBy {
			if !slices.ContainsFunc(t.Columns, func(c outbox.Column) bool { return c.Name == name }) {
				rs = append(rs, wal.Mend(aboutOldRows, wal.Remedy{Commands: []string{"export " + envName("snapshot.order_by") + "='[]'"},
					Or: "correct snapshot.order_by in the file"}, "table %s has no column %q to order old rows by", t.Name, name))
			}
		}
		schema, name, err := outbox.ParseTable(t.Name)
		if err != nil {
			continue // refused when the configuration was read
		}
		switch {
		case !t.Selectable:
			rs = append(rs, wal.Mend(aboutOldRows, wal.Remedy{Role: f.Admin, SQL: []string{
				"GRANT USAGE ON SCHEMA " + outbox.QuoteIdentifier(schema) + " TO " + role,
				"GRANT SELECT ON " + outbox.QuoteTable(schema, name) + " TO " + role,
			}, Or: "set snapshot.mode: never, which leaves old rows out"}, "role %s may not read the old rows of table %s", f.Role.Name, t.Name))
		case t.RowSecurity:
			rs = append(rs, wal.Mend(aboutOldRows, wal.Remedy{Role: f.Admin, SQL: []string{"ALTER ROLE " + role + " BYPASSRLS"},
				Or: "set snapshot.mode: never, which leaves old rows out"}, "row-level security would hide rows of table %s from role %s", t.Name, f.Role.Name))
		}
	}
	return rs
}

// messageIDProblems refuses several tables whose event IDs can be equal: a
// consumer that deduplicates would drop the second.
func (c Config) messageIDProblems(f wal.Findings) []*wal.Refusal {
	const uuidOID = 2950
	if len(f.Tables) < 2 || c.Router.MessageID != router.DefaultMessageID {
		return nil
	}
	for i, t := range f.Tables {
		name := c.Source.Tables[i].Columns.ID
		if name == "" {
			name = "id"
		}
		for _, col := range t.Columns {
			if col.Name == name && col.Type != uuidOID {
				return []*wal.Refusal{wal.Mend(aboutMessageIDs, wal.Remedy{Commands: []string{"export " + envName("router.message_id") + "='{table}:{id}'"},
					Or: `set router.message_id: "{table}:{id}" in the file`}, "events of several tables may have equal IDs: column %s of %s is not a uuid", name, t.Name)}
			}
		}
	}
	return nil
}

// orderOf is the order in which a table's old rows are published, and whether it
// says anything about the order of their commits.
func (c Config) orderOf(i int, t wal.TableState) (columns []string, known bool) {
	if len(c.Snapshot.OrderBy) > 0 {
		return c.Snapshot.OrderBy, true
	}
	m, err := outbox.Bind(t.Name, t.Columns, c.Source.Tables[i].Columns.columns())
	if err != nil {
		return nil, false
	}
	columns = m.OrderBy()
	return columns, len(columns) > 1
}

// psql is the shell command that runs statements in the connector's database.
func psql(host string, port uint16, database, role string, statements []string) string {
	args := []string{"psql", "-h", shellQuote(host), "-p", fmt.Sprint(port), "-U", shellQuote(role), "-d", shellQuote(database)}
	for _, s := range statements {
		args = append(args, "-c", shellQuote(s))
	}
	return strings.Join(args, " ")
}
