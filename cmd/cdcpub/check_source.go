package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
	"github.com/cdcpub/cdcpub/wal"
)

// sourceCheck gathers what there is to say about PostgreSQL and the saved state.
type sourceCheck struct {
	cfg      Config
	found    wal.Findings
	host     string
	port     uint16
	findings []finding
}

// checkSource looks at the database and at what is saved. It also says where the
// rows that are in the tables would go.
func (a *app) checkSource(ctx context.Context, cfg Config) ([]finding, []destination) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	c := &sourceCheck{cfg: cfg}
	saved, stateOK := c.state()
	conn, err := wal.ConnectSQL(ctx, cfg.walConfig())
	if err == nil {
		defer conn.Close()
		c.found, err = conn.Inspect(ctx)
	}
	if err != nil {
		c.add(levelFail, "PostgreSQL", "%v", err)
		return c.findings, nil
	}
	server := conn.Sibling()
	c.host, c.port = server.Host, server.Port
	c.add(levelOK, "PostgreSQL", "%s at %s:%d, database %s, role %s", c.found.Version, c.host, c.port, c.found.Source.Database, c.found.Role.Name)
	// A connector that runs holds the slot and has its walsender already.
	running := a.running(ctx, cfg)
	c.server()
	c.senders(ctx, running)
	c.tables()
	c.publication()
	c.slot(saved, stateOK, running)
	c.problems("", cfg.messageIDProblems(c.found))
	destinations := c.oldRows(ctx, server, saved)
	return c.findings, destinations
}

// running reports whether a connector with this configuration answers.
func (a *app) running(ctx context.Context, cfg Config) bool {
	if cfg.Monitor.Listen == monitorOff {
		return false
	}
	s, err := askMonitor(ctx, cfg.Monitor.Listen)
	return err == nil && s.Source.Slot == cfg.Source.Slot
}

func (c *sourceCheck) add(l level, name, format string, args ...any) {
	c.findings = append(c.findings, finding{Name: name, Level: l, Text: fmt.Sprintf(format, args...)})
}

// failed reports whether something about the source is wrong already.
func (c *sourceCheck) failed() bool { return failedChecks(c.findings) != nil }

// problems has a line for each refusal about name (all of them if that is empty),
// and reports whether there was one.
func (c *sourceCheck) problems(name string, refusals []*wal.Refusal) bool {
	any := false
	for _, r := range refusals {
		if name == "" || r.About == name {
			any = true
			c.findings = append(c.findings, c.refused(name, r))
		}
	}
	return any
}

// refused puts a refusal into the form of a finding. Statements become a psql
// command for the server that was reached.
func (c *sourceCheck) refused(name string, r *wal.Refusal) finding {
	if r.About != "" {
		name = r.About
	}
	f := finding{Name: name, Level: levelFail, Text: r.Text}
	if r.Remedy == nil {
		f.Note = r.Hint
		return f
	}
	role := r.Remedy.Role
	if len(r.Remedy.SQL) > 0 {
		if role == "" {
			role = "ADMIN"
		}
		f.Fix, f.As = []string{psql(c.host, c.port, c.found.Source.Database, role, r.Remedy.SQL)}, "PostgreSQL role "+role
	}
	f.Fix = append(f.Fix, r.Remedy.Commands...)
	switch {
	case r.Remedy.Then != "":
		f.Note = "then " + r.Remedy.Then
	case r.Remedy.Or != "":
		f.Note = "or " + r.Remedy.Or
	}
	return f
}

// check is ok with text unless one of the refusals is about name.
func (c *sourceCheck) check(name string, refusals []*wal.Refusal, text string, args ...any) {
	if !c.problems(name, refusals) {
		c.add(levelOK, name, text, args...)
	}
}

func (c *sourceCheck) server() {
	f, ps := c.found, c.found.Problems(c.walConfig())
	c.check(wal.AboutWALLevel, ps, "is %s", f.WALLevel)
	c.check(wal.AboutPrimary, ps, "the server takes writes")
	c.check(wal.AboutSynchronous, ps, "does not name this connector")
	c.check(wal.AboutRole, ps, "%s may read from a replication slot", f.Role.Name)
	c.check(wal.AboutSlotsLeft, ps, "%d of %d slots are taken", f.Slots.Used, f.Slots.Max)
}

func (c *sourceCheck) walConfig() wal.Config { return c.cfg.walConfig() }

// senders looks for a free walsender, and opens a replication connection, which
// pg_hba.conf or a proxy may keep away.
func (c *sourceCheck) senders(ctx context.Context, running bool) {
	const name = "max_wal_senders"
	f := c.found
	switch {
	case running:
		c.add(levelOK, name, "%d of %d are taken, one by the running connector", f.Senders.Used, f.Senders.Max)
	case f.Senders.Full():
		c.findings = append(c.findings, c.refused(name, f.NoSenders()))
	case !f.Role.Replication:
		c.add(levelUnknown, name, "%d of %d are taken; no replication connection was tried, since the role may not open one", f.Senders.Used, f.Senders.Max)
	default:
		conn, err := wal.Connect(ctx, c.walConfig())
		if err != nil {
			c.add(levelFail, name, "%d of %d are taken, but no replication connection can be opened: %v", f.Senders.Used, f.Senders.Max, err)
			return
		}
		conn.Close()
		c.add(levelOK, name, "%d of %d are taken, and a replication connection can be opened", f.Senders.Used, f.Senders.Max)
	}
}

func (c *sourceCheck) tables() {
	ps := c.found.Problems(c.walConfig())
	for _, t := range c.found.Tables {
		var names []string
		for _, col := range t.Columns {
			names = append(names, col.Name)
		}
		c.check(wal.AboutTable+t.Name, ps, "has the columns %s", strings.Join(names, ", "))
	}
}

func (c *sourceCheck) publication() {
	name := wal.AboutPublication + c.cfg.Source.Publication
	text := ""
	if p := c.found.Publication; p != nil {
		text = "publishes inserts into " + strings.Join(p.Tables, ", ")
	}
	c.check(name, c.found.Problems(c.walConfig()), "%s", text)
}

// slot says how the slot and the saved position go together. That is asked last:
// whatever else is wrong may be the reason.
func (c *sourceCheck) slot(saved offsets.Checkpoint, stateOK, running bool) {
	name := wal.AboutSlot + c.cfg.Source.Slot
	plan, err := wal.Decide(c.walConfig(), saved, c.found)
	var refusal *wal.Refusal
	switch {
	case !stateOK:
		c.add(levelUnknown, name, "not compared, since the saved state cannot be read")
	case errors.As(err, &refusal) && refusal.Cause == wal.SlotBusy && running:
		c.add(levelOK, name, "the connector runs and reads from it (%s)", c.found.Slot)
	case errors.As(err, &refusal) && refusal.About != name && (refusal.Cause == wal.Setup || refusal.About != "") && c.failed():
		c.add(levelUnknown, name, "not compared with the saved position until the above is mended")
	case errors.As(err, &refusal):
		c.refusedSlot(c.refused(name, refusal))
	case plan.Action == wal.ActionCreate:
		c.add(levelOK, name, "does not exist yet: run creates it")
	case plan.Action == wal.ActionSnapshot:
		c.add(levelOK, name, "run publishes the old rows again and then streams from %s", plan.Pos)
	default:
		c.add(levelOK, name, "run goes on at %s (%s)", plan.Pos, c.found.Slot)
	}
}

// refusedSlot says once what mends both: a second service with the first one's
// names has the wrong publication, too.
func (c *sourceCheck) refusedSlot(f finding) {
	for i := range c.findings {
		if earlier := &c.findings[i]; earlier.Level == levelFail && len(f.Fix) > 0 && slices.Equal(earlier.Fix, f.Fix) {
			earlier.Fix, earlier.Note = nil, "mended by the commands for "+f.Name+", below"
		}
	}
	c.findings = append(c.findings, f)
}

// state looks at the directory that keeps the position.
func (c *sourceCheck) state() (saved offsets.Checkpoint, ok bool) {
	const name = "state"
	path := c.cfg.Offsets.Path
	saved, err := filestore.Read(path)
	switch {
	case err == nil && !mayWrite(path):
		c.add(levelFail, name, "%s cannot be written to by this user", path)
		return saved, true
	case err == nil && saved.Phase != "":
		c.add(levelOK, name, "%s has position %s, phase %s", path, saved.Pos, saved.Phase)
		return saved, true
	case err == nil:
		c.add(levelOK, name, "%s holds no position yet", path)
		return saved, true
	case !errors.Is(err, fs.ErrNotExist):
		c.add(levelFail, name, "%v", err)
		return saved, false
	}
	parent := filepath.Dir(filepath.Clean(path))
	info, err := os.Stat(parent)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		c.findings = append(c.findings, finding{Name: name, Level: levelFail, Fix: []string{"mkdir -p " + shellQuote(parent)},
			Text: fmt.Sprintf("%s does not exist, and %s cannot be made in it", parent, filepath.Base(path))})
	case err != nil:
		c.add(levelFail, name, "%v", err)
	case !info.IsDir() || !mayWrite(parent):
		c.add(levelFail, name, "%s cannot be made: %s is not a directory that may be written to", path, parent)
	default:
		c.add(levelOK, name, "nothing is saved yet: run makes %s", path)
	}
	return offsets.Checkpoint{}, true
}
