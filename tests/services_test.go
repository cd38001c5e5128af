package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// A service that comes second with the same names is refused by name, at once and
// as often as it asks, and the first one never notices.
func TestASecondServiceWithTheSameNamesIsRefusedAndTheFirstGoesOn(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	rabbittest.Queue(t, url, name, name+".order", "#", nil)
	first := newConnector(t, dsn, url, name)
	first.must("init", "--create-table")
	first.start()
	eventually(t, time.Minute, "the first service streams", func() bool { return first.status().Ready })

	second := newConnector(t, dsn, url, name)
	second.env["CDCPUB_SOURCE_TABLES"] = "[{name: billing.outbox}]"
	pgtest.Exec(t, dsn, "CREATE SCHEMA billing")
	_, stderr, code := second.cli("init", "--create-table")
	if code != 1 || !strings.Contains(stderr, "serves public.outbox, not billing.outbox") || !strings.Contains(stderr, "CDCPUB_SOURCE_SLOT=cdcpub_") {
		t.Errorf("init of the second service: exit %d: %s", code, stderr)
	}
	for range 2 { // the first attempt must not leave anything that lets the next one in
		_, stderr, code = second.cli("run", "--exit-on-refusal")
		if code != 3 || !strings.Contains(stderr, `slot "`+name+`" serves public.outbox, not this service`) || !strings.Contains(stderr, "source.slot") {
			t.Errorf("run of the second service: exit %d: %s", code, stderr)
		}
	}
	second.start()
	eventually(t, 5*time.Second, "the second service says so without being asked again", func() bool {
		s := second.status()
		return s.State == "refused" && !s.Ready && strings.Contains(s.Reason, "serves public.outbox")
	})

	pgtest.Exec(t, dsn, `INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', '1', 'Made', '{}', 1)`)
	eventually(t, 20*time.Second, "the first service publishes", func() bool { return first.status().Counters.Confirmed == 1 })
	if !first.status().Ready {
		t.Error("the first service is not ready any more")
	}
	second.stop()

	// With names of its own it works, beside the first.
	own := name[:min(len(name), 55)] + "_own"
	second.env["CDCPUB_SOURCE_SLOT"], second.env["CDCPUB_SOURCE_PUBLICATION"] = own, own
	second.must("init")
	second.start()
	eventually(t, time.Minute, "the second service streams", func() bool { return second.status().Ready })
	second.stop()
	second.must("teardown", "--yes")
	first.stop()
}

// Slot names are unique in the whole cluster, so the same happens to a service in
// another database.
func TestAServiceOfAnotherDatabaseIsToldWhoseTheSlotIs(t *testing.T) {
	t.Parallel()
	dsn, other, url, name := pgtest.Database(t), pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	first := newConnector(t, dsn, url, name)
	first.must("init", "--create-table")
	first.start()
	eventually(t, time.Minute, "the first service streams", func() bool { return first.status().Ready })
	second := newConnector(t, other, url, name)
	for _, tc := range []struct {
		args []string
		exit int
	}{{[]string{"init", "--create-table"}, 1}, {[]string{"run", "--exit-on-refusal"}, 2}} {
		_, stderr, code := second.cli(tc.args...)
		if code != tc.exit || !strings.Contains(stderr, "belongs to database") || !strings.Contains(stderr, "CDCPUB_SOURCE_SLOT=cdcpub_") {
			t.Errorf("%v: exit %d: %s", tc.args, code, stderr)
		}
	}
	if !first.status().Ready {
		t.Error("the first service was disturbed")
	}
	first.stop()
}
