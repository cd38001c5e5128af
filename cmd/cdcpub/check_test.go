package main

import (
	"bytes"
	"errors"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/wal"
)

func TestFindingsHaveALineEachAndTheirCommandsAlone(t *testing.T) {
	var out bytes.Buffer
	printFindings(&out, []finding{
		{Name: "wal_level", Level: levelFail, Text: "is replica", Fix: []string{"psql -c 'ALTER SYSTEM'", "echo 2"}, As: "PostgreSQL role postgres", Note: "then restart PostgreSQL"},
		{Name: "role", Level: levelOK, Text: "a:\n\tb\n\tc"},
		{Name: "publication cdcpub", Level: levelFail, Text: "does not exist", Fix: []string{"cdcpub init"}},
		{Name: "old rows", Level: levelWarn, Text: "in key order", Note: "name a column"},
	})
	want := `fail    wal_level           is replica
        to mend it, as PostgreSQL role postgres:
            psql -c 'ALTER SYSTEM'
            echo 2
        then restart PostgreSQL
ok      role                a: b; c
fail    publication cdcpub  does not exist
        to mend it:
            cdcpub init
warn    old rows            in key order
        name a column
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("output (-want +got):\n%s", d)
	}
}

func TestOnlyAFailureFailsACheck(t *testing.T) {
	var failed checkFailedError
	for name, tc := range map[string]struct {
		levels []level
		want   int
	}{
		"nothing was looked at":           {nil, 0},
		"a warning is no failure":         {[]level{levelOK, levelWarn}, 0},
		"nor is what could not be seen":   {[]level{levelUnknown}, 0},
		"each failure counts":             {[]level{levelFail, levelOK, levelFail}, 2},
		"one that follows others does so": {[]level{levelOK, levelWarn, levelFail}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var list []finding
			for _, l := range tc.levels {
				list = append(list, finding{Level: l})
			}
			err := failedChecks(list)
			if errors.As(err, &failed) != (tc.want > 0) || tc.want > 0 && failed.failed != tc.want {
				t.Errorf("failedChecks = %v, want %d", err, tc.want)
			}
			if code := exitCode(err); code != min(tc.want, 1) {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// The printed commands are copied into a shell, whatever names a database has.
func TestShellQuoteSurvivesAShell(t *testing.T) {
	for _, s := range []string{"plain", "", "two words", "it's", `"quoted" $HOME`, "a`b`c", "*", "ümlaut", "semi;colon", "new\nline", "'", "--x", "~"} {
		out, err := exec.Command("sh", "-c", "printf %s "+shellQuote(s)).Output()
		if s == "--x" {
			// An option stays one: quoting cannot change that.
			continue
		}
		if err != nil || string(out) != s {
			t.Errorf("shellQuote(%q) = %s: a shell reads %q, %v", s, shellQuote(s), out, err)
		}
	}
}

func TestPsqlCommandNamesServerRoleAndStatements(t *testing.T) {
	got := psql("/var/run/postgresql", 5433, "my shop", "o'hara", []string{`ALTER ROLE "x" REPLICATION`, "SELECT 1"})
	want := `psql -h /var/run/postgresql -p 5433 -U 'o'\''hara' -d 'my shop' -c 'ALTER ROLE "x" REPLICATION' -c 'SELECT 1'`
	if got != want {
		t.Errorf("psql command\n%s\nwant\n%s", got, want)
	}
}

func TestARefusalBecomesAFinding(t *testing.T) {
	c := &sourceCheck{host: "db", port: 5432, found: wal.Findings{}}
	c.found.Source.Database = "shop"
	for name, tc := range map[string]struct {
		refusal *wal.Refusal
		want    finding
	}{
		"statements become a psql command of who may run them": {
			wal.Mend("role", wal.Remedy{SQL: []string{"ALTER ROLE x"}, Role: "postgres", Then: "wait"}, "no right"),
			finding{Name: "role", Level: levelFail, Text: "no right", Fix: []string{"psql -h db -p 5432 -U postgres -d shop -c 'ALTER ROLE x'"},
				As: "PostgreSQL role postgres", Note: "then wait"}},
		"where the superuser is not known there is a placeholder": {
			wal.Mend("role", wal.Remedy{SQL: []string{"GRANT a TO b"}}, "no right"),
			finding{Name: "role", Level: levelFail, Text: "no right", Fix: []string{"psql -h db -p 5432 -U ADMIN -d shop -c 'GRANT a TO b'"}, As: "PostgreSQL role ADMIN"}},
		"commands stay as they are": {
			wal.Mend("table x", wal.Remedy{Commands: []string{"cdcpub init"}, Or: "make it"}, "missing"),
			finding{Name: "table x", Level: levelFail, Text: "missing", Fix: []string{"cdcpub init"}, Note: "or make it"}},
		"what somebody has to decide is a note": {
			&wal.Refusal{Cause: wal.Gap, Text: "moved", Hint: "find out who"},
			finding{Name: "slot cdcpub", Level: levelFail, Text: "moved", Note: "find out who"}},
	} {
		t.Run(name, func(t *testing.T) {
			if d := cmp.Diff(tc.want, c.refused("slot cdcpub", tc.refusal)); d != "" {
				t.Errorf("finding (-want +got):\n%s", d)
			}
		})
	}
}

// A command that leaves the file out would look at, or drop, something else.
func TestPrintedCommandsReadTheSameFile(t *testing.T) {
	findings := []finding{
		{Fix: []string{"cdcpub teardown", "export A=b && cdcpub init", "psql -c 'SELECT 1'"}, Note: "as another user: URL='x' cdcpub init --broker"},
		{Note: "then cdcpub run publishes"},
	}
	(&app{configFile: "my $1 file.yml"}).withConfig(findings)
	want := []finding{
		{Fix: []string{"cdcpub --config 'my $1 file.yml' teardown", "export A=b && cdcpub --config 'my $1 file.yml' init", "psql -c 'SELECT 1'"},
			Note: "as another user: URL='x' cdcpub --config 'my $1 file.yml' init --broker"},
		{Note: "then cdcpub run publishes"},
	}
	if d := cmp.Diff(want, findings); d != "" {
		t.Error(d)
	}
}

func TestOnlyColumnsOfTheKindDecideOnTheExchange(t *testing.T) {
	for exchange, want := range map[string]bool{
		"events": true, "outbox.event.{aggregate_type}": true, "{tenant}.{type}.{schema_version}": true,
		"{tenant}.{aggregate_id}": false, "{column.region}": false, "x.{partition:4}": false,
	} {
		if got := kindsDecide(exchange); got != want {
			t.Errorf("%s: %v, want %v", exchange, got, want)
		}
	}
}
