package wal

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cdcpub/cdcpub/outbox"
)

// Problems lists what is wrong with the server's and the database's set-up,
// whatever is saved: all of it, so that one round of mending is enough. A slot
// that exists counts as ours.
func (f Findings) Problems(cfg Config) []*Refusal {
	return slices.Concat(f.server(), f.role(), f.slotsLeft(cfg), f.tables(cfg), f.publication(cfg), f.slotKind(cfg))
}

func first(lists ...[]*Refusal) *Refusal {
	for _, list := range lists {
		if len(list) > 0 {
			return list[0]
		}
	}
	return nil
}

func (f Findings) server() []*Refusal {
	var rs []*Refusal
	if f.WALLevel != "logical" {
		rs = append(rs, Mend(AboutWALLevel, f.setting("wal_level", "logical"), "wal_level is %q, logical decoding needs \"logical\"", f.WALLevel))
	}
	if f.InRecovery {
		r := refuse(Setup, "point source.dsn at the primary (several hosts with target_session_attrs=read-write find it)", "the server is a standby")
		r.About = AboutPrimary
		rs = append(rs, r)
	}
	if isSyncStandby(f.SyncStandbys, f.ApplicationName) {
		rs = append(rs, f.syncStandby())
	}
	return rs
}

// setting is the remedy for a setting that only a restart changes.
func (f Findings) setting(name, value string) Remedy {
	switch {
	case f.Provider == SelfHosted:
		return Remedy{SQL: []string{"ALTER SYSTEM SET " + name + " = " + value}, Role: f.Admin, Then: "restart PostgreSQL"}
	case f.Provider == AmazonRDS && name == "wal_level":
		return Remedy{Then: "set rds.logical_replication to 1 in the parameter group of the instance or cluster and reboot it"}
	case f.Provider == CloudSQL && name == "wal_level":
		return Remedy{Then: "set the flag cloudsql.logical_decoding to on, which restarts the instance"}
	default:
		return Remedy{Then: fmt.Sprintf("set the server parameter %s to %s at the provider and restart the server", name, value)}
	}
}

func (f Findings) syncStandby() *Refusal {
	const text = "synchronous_standby_names = '%s' makes this connector a synchronous standby: a dead broker would freeze the application's commits"
	value, ok := withoutStandby(f.SyncStandbys, f.ApplicationName, f.Standbys)
	if !ok {
		r := refuse(Setup, "name the real standbys in synchronous_standby_names", text, f.SyncStandbys)
		r.About = AboutSynchronous
		return r
	}
	return Mend(AboutSynchronous, Remedy{SQL: []string{"ALTER SYSTEM SET synchronous_standby_names = " + literal(value), "SELECT pg_reload_conf()"}, Role: f.Admin},
		text, f.SyncStandbys)
}

// withoutStandby takes name out of a synchronous_standby_names; "*" becomes the
// standbys that are connected. It reports false where it cannot say which those
// are.
func withoutStandby(names, name string, connected []string) (string, bool) {
	method, list := "", names
	if before, rest, ok := strings.Cut(names, "("); ok {
		method, list = strings.TrimSpace(before), strings.TrimSuffix(strings.TrimSpace(rest), ")")
	}
	var keep []string
	for token := range strings.SplitSeq(list, ",") {
		token = strings.TrimSpace(token)
		bare := strings.Trim(token, `"`)
		switch {
		case bare == "*" && connected == nil:
			return "", false
		case bare == "*":
			for _, c := range connected {
				keep = append(keep, outbox.QuoteIdentifier(c))
			}
		case !strings.EqualFold(bare, name):
			keep = append(keep, token)
		}
	}
	if len(keep) == 0 || method == "" {
		return strings.Join(keep, ", "), true
	}
	fields := strings.Fields(method)
	if n, err := strconv.Atoi(fields[len(fields)-1]); err == nil {
		// More than there are would make every commit wait for ever.
		fields[len(fields)-1] = strconv.Itoa(min(n, len(keep)))
	}
	return fmt.Sprintf("%s (%s)", strings.Join(fields, " "), strings.Join(keep, ", ")), true
}

// isSyncStandby reports whether a walsender of that application name counts as
// a synchronous standby. "*" matches every name.
func isSyncStandby(names, application string) bool {
	tokens := strings.FieldsFunc(names, func(r rune) bool { return strings.ContainsRune(` ,()"`, r) })
	return slices.ContainsFunc(tokens, func(t string) bool { return t == "*" || strings.EqualFold(t, application) })
}

func (f Findings) role() []*Refusal {
	if f.Role.Replication {
		return nil
	}
	role := outbox.QuoteIdentifier(f.Role.Name)
	remedy := Remedy{SQL: []string{"ALTER ROLE " + role + " REPLICATION"}, Role: f.Admin}
	if f.Provider == AmazonRDS {
		remedy.SQL = []string{"GRANT rds_replication TO " + role}
	}
	return []*Refusal{Mend(AboutRole, remedy, "role %s may not read from a replication slot", f.Role.Name)}
}

func (f Findings) slotsLeft(cfg Config) []*Refusal {
	if f.Slot != nil || !f.Slots.Full() {
		return nil
	}
	return []*Refusal{Mend(AboutSlotsLeft, f.setting("max_replication_slots", strconv.Itoa(f.Slots.Max+4)),
		"all %d replication slots are taken, slot %q needs one", f.Slots.Max, cfg.Slot)}
}

func (f Findings) tables(cfg Config) []*Refusal {
	var rs []*Refusal
	for i, t := range f.Tables {
		quoted := t.quoted()
		_, err := outbox.Bind(t.Name, t.Columns, cfg.Tables[i].Columns)
		switch {
		case t.OID == 0:
			rs = append(rs, Mend(AboutTable+t.Name, Remedy{Commands: []string{"cdcpub init --create-table"}}, "table %s does not exist", t.Name))
		case t.Kind != "r" && t.Kind != "p":
			r := refuse(Setup, "name the table itself in source.tables", "%s is not a table: a view leaves no trace in the log", t.Name)
			r.About = AboutTable + t.Name
			rs = append(rs, r)
		case t.Persistence == "u":
			rs = append(rs, Mend(AboutTable+t.Name, Remedy{SQL: []string{"ALTER TABLE " + quoted + " SET LOGGED"}, Role: t.Owner},
				"table %s is unlogged and leaves no trace in the log", t.Name))
		case t.Persistence != "p":
			r := refuse(Setup, "make it an ordinary table", "table %s is temporary and leaves no trace in the log", t.Name)
			r.About = AboutTable + t.Name
			rs = append(rs, r)
		case err != nil:
			r := refuse(Setup, "", "%v", err)
			r.About = AboutTable + t.Name
			rs = append(rs, r)
		}
	}
	return rs
}

func (t TableState) quoted() string {
	schema, name, err := outbox.ParseTable(t.Name)
	if err != nil {
		return t.Name // refused when the configuration was read
	}
	return outbox.QuoteTable(schema, name)
}

func (f Findings) publication(cfg Config) []*Refusal {
	p := f.Publication
	if p == nil && f.Slot != nil {
		r := startOver(Gap, "publication %q does not exist, but replication slot %q does: a publication made now would not cover its rows", cfg.Publication, cfg.Slot)
		r.About = AboutPublication + cfg.Publication
		return []*Refusal{r}
	}
	if p == nil {
		return []*Refusal{Mend(AboutPublication+cfg.Publication, Remedy{Commands: []string{"cdcpub init"}}, "publication %q does not exist", cfg.Publication)}
	}
	alter := "ALTER PUBLICATION " + outbox.QuoteIdentifier(cfg.Publication)
	mend := func(sql, format string, args ...any) *Refusal {
		return Mend(AboutPublication+cfg.Publication, Remedy{SQL: []string{sql}, Role: p.Owner}, format, args...)
	}
	var rs []*Refusal
	if !p.Insert {
		rs = append(rs, mend(alter+" SET (publish = 'insert')", "publication %q does not publish inserts", cfg.Publication))
	}
	for _, t := range f.Tables {
		switch {
		case t.OID == 0:
		case !t.Published && t.Kind == "p" && !p.ViaRoot:
			rs = append(rs, mend(alter+" SET (publish_via_partition_root = true)",
				"publication %q publishes the partitions of %s under their own names", cfg.Publication, t.Name))
		case !t.Published:
			rs = append(rs, f.notPublished(cfg, t, alter))
		case t.RowFilter, t.ColumnList:
			rs = append(rs, f.filtered(cfg, t, alter))
		}
	}
	return rs
}

// notPublished is a refusal with two ways out: a publication that no slot streams
// yet can take the table, another connector's must be left alone.
func (f Findings) notPublished(cfg Config, t TableState, alter string) *Refusal {
	const text = "publication %q serves %s, not %s"
	serves := f.Publication.serves()
	switch {
	case f.Slot != nil && f.servesUs():
		// A table was added: the rows that it has got since then passed unseen.
		r := startOver(Gap, text, cfg.Publication, serves, t.Name)
		r.About = AboutPublication + cfg.Publication
		return r
	case f.Slot != nil:
		return Mend(AboutPublication+cfg.Publication, f.ownNames(cfg), text, cfg.Publication, serves, t.Name)
	}
	return Mend(AboutPublication+cfg.Publication, Remedy{SQL: []string{alter + " ADD TABLE " + t.quoted()}, Role: f.Publication.Owner,
		Or: "if it is another service's publication, set source.publication to a name of this one's own"}, text, cfg.Publication, serves, t.Name)
}

// filtered is about a publication that holds back rows or columns. Taking the
// table out and in again is the one way that no slot may wait for.
func (f Findings) filtered(cfg Config, t TableState, alter string) *Refusal {
	const text = "publication %q has a row filter or a column list on %s, which is not supported yet"
	if f.Slot != nil {
		r := refuse(Setup, "publish the table without them: "+recoverHint, text, cfg.Publication, t.Name)
		r.About = AboutPublication + cfg.Publication
		return r
	}
	return Mend(AboutPublication+cfg.Publication, Remedy{SQL: []string{alter + " DROP TABLE " + t.quoted(), alter + " ADD TABLE " + t.quoted()}, Role: f.Publication.Owner},
		text, cfg.Publication, t.Name)
}

func (p *Publication) serves() string {
	if len(p.Tables) == 0 {
		return "no table"
	}
	return strings.Join(p.Tables, ", ")
}

// slotKind refuses a slot that is none of ours, whoever made it.
func (f Findings) slotKind(cfg Config) []*Refusal {
	s := f.Slot
	if s == nil {
		return nil
	}
	text := ""
	switch {
	case s.Type != "logical":
		text = fmt.Sprintf("replication slot %q is a %s slot", cfg.Slot, s.Type)
	case s.Plugin != "pgoutput":
		text = fmt.Sprintf("replication slot %q belongs to plugin %q, not pgoutput", cfg.Slot, s.Plugin)
	case s.Database != f.Source.Database:
		text = fmt.Sprintf("replication slot %q belongs to database %q, not %q", cfg.Slot, s.Database, f.Source.Database)
	case s.Temporary:
		text = fmt.Sprintf("replication slot %q is temporary", cfg.Slot)
	case s.TwoPhase:
		text = fmt.Sprintf("replication slot %q decodes prepared transactions (two_phase)", cfg.Slot)
	default:
		return nil
	}
	return []*Refusal{Mend(AboutSlot+cfg.Slot, f.ownNames(cfg), "%s", text)}
}

// foreignSlot refuses a slot that is there although nothing is saved. It names
// what the slot serves, since the commonest cause is a second service that was
// started with the default names.
func foreignSlot(cfg Config, f Findings) *Refusal {
	if r := first(f.slotKind(cfg)); r != nil {
		return r
	}
	if p := f.Publication; p != nil && len(p.Tables) > 0 && !f.servesUs() {
		r := Mend(AboutSlot+cfg.Slot, f.ownNames(cfg), "replication slot %q serves %s, not this service (%s)", cfg.Slot, p.serves(), f.Slot)
		r.Cause = Gap
		return r
	}
	r := refuse(Gap, "set source.slot and source.publication to names of its own, bring back the state directory, or drop the slot with cdcpub teardown --without-state",
		"replication slot %q exists (%s), but nothing is saved here: it may be another connector's", cfg.Slot, f.Slot)
	r.About = AboutSlot + cfg.Slot
	return r
}

// servesUs reports whether the publication has one of our tables.
func (f Findings) servesUs() bool {
	return slices.ContainsFunc(f.Tables, func(t TableState) bool { return slices.Contains(f.Publication.Tables, t.Name) })
}

// ownNames proposes a slot and a publication that are not taken for a table: slot
// names are unique in the whole cluster, so the database is part of it.
func (f Findings) ownNames(cfg Config) Remedy {
	name := "cdcpub_" + f.Source.Database
	if len(cfg.Tables) > 0 {
		if schema, table, err := outbox.ParseTable(cfg.Tables[0].Name); err == nil {
			if schema != "public" {
				name += "_" + schema
			}
			name += "_" + table
		}
	}
	name = strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '_'
		}
	}, name)
	name = name[:min(len(name), 63)]
	return Remedy{Commands: []string{fmt.Sprintf("export CDCPUB_SOURCE_SLOT=%s CDCPUB_SOURCE_PUBLICATION=%s", name, name), "cdcpub init"},
		Or: "set source.slot and source.publication in the file"}
}

// NoSenders is the refusal of a server whose last walsender is taken. Only who
// asks over an ordinary connection (ConnectSQL) can meet it.
func (f Findings) NoSenders() *Refusal {
	return Mend("max_wal_senders", f.setting("max_wal_senders", strconv.Itoa(f.Senders.Max+4)), "all %d are taken, and run needs one", f.Senders.Max)
}
