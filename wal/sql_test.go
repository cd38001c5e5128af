package wal

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/internal/pgtest"
)

// check and init must come to the same conclusions as run, which asks over a
// replication connection.
func TestAnOrdinaryConnectionFindsWhatAReplicationConnectionFinds(t *testing.T) {
	cfg := configure(t, pgtest.Database(t))
	walsender := connect(t, cfg)
	create(t, walsender)
	ordinary, err := ConnectSQL(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer ordinary.Close()
	want, got := inspect(t, walsender), inspect(t, ordinary)
	// Other tests write to the same server.
	if got.WALEnd < want.WALEnd {
		t.Errorf("WAL ends at %s, before %s", got.WALEnd, want.WALEnd)
	}
	want.WALEnd, want.Slots, want.Senders, want.Standbys = got.WALEnd, got.Slots, got.Senders, got.Standbys
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("findings (-replication +ordinary):\n%s", d)
	}
	if got.Version == "" || got.Role.Name != "postgres" || got.Admin != "postgres" || !got.Role.Replication || got.Slots.Max == 0 || got.Senders.Max == 0 {
		t.Errorf("findings are incomplete: %+v", got)
	}
}

func TestARoleThatMayNotReplicateCanStillBeToldSo(t *testing.T) {
	dsn := pgtest.Database(t)
	cfg := configure(t, dsn)
	pgtest.Exec(t, dsn, "CREATE ROLE wal_sql_poor LOGIN")
	t.Cleanup(func() { pgtest.Exec(t, dsn, "DROP ROLE wal_sql_poor") })
	cfg.DSN = strings.Replace(dsn, "postgres@", "wal_sql_poor@", 1)
	conn, err := ConnectSQL(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	found := inspect(t, conn)
	if found.Role.Replication || found.Tables[0].Selectable {
		t.Errorf("role %+v, table %+v: want no rights", found.Role, found.Tables[0])
	}
	if r := first(found.role()); r == nil || r.Remedy.Role != "postgres" {
		t.Errorf("refusal %v: want one that postgres can mend", r)
	}
}
