package tests

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

func TestOffsetShowPutsTheSavedPositionBesideTheSlot(t *testing.T) {
	t.Parallel()
	dsn, url, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	rabbittest.Queue(t, url, name, name+".order", "#", nil)
	c := newConnector(t, dsn, url, name)
	show := func() string {
		t.Helper()
		stdout, stderr, code := c.cli("offset", "show")
		if code != 0 {
			t.Fatalf("exit %d: %s", code, stderr)
		}
		return stdout
	}
	c.must("init", "--create-table")
	if text := show(); !strings.Contains(text, "nothing in "+c.env["CDCPUB_OFFSETS_PATH"]) || !strings.Contains(text, "does not exist") {
		t.Errorf("before the first run:\n%s", text)
	}
	c.start()
	eventually(t, time.Minute, "the connector streams", func() bool { return c.status().Ready })
	pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', '1', 'Made', '{}', 1)")
	caughtUp(t, c, dsn, time.Minute)
	if text := show(); !strings.Contains(text, "phase streaming") || !strings.Contains(text, "in use") {
		t.Errorf("while it runs:\n%s", text)
	}
	c.stop()

	var report struct {
		Saved struct {
			Pos struct{ LSN string }
		}
		Server struct {
			SlotExists     bool   `json:"slot_exists"`
			ConfirmedFlush string `json:"confirmed_flush"`
			Active         bool
			Behind         *uint64 `json:"behind_bytes"`
		}
		Error string
	}
	stdout, _, _ := c.cli("offset", "show", "--output", "json")
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatalf("%v:\n%s", err, stdout)
	}
	s := report.Server
	if !s.SlotExists || s.Active || s.ConfirmedFlush == "" || s.Behind == nil || report.Saved.Pos.LSN != s.ConfirmedFlush {
		t.Errorf("after a clean stop saved and confirmed are not the same:\n%s", stdout)
	}

	// The server may be away; what is saved is there all the same.
	c.env["CDCPUB_SOURCE_DSN"] = "postgres://postgres:s3cret@127.0.0.1:1/x?sslmode=disable"
	if text := show(); !strings.Contains(text, "phase streaming") || !strings.Contains(text, "not asked") || strings.Contains(text, "s3cret") {
		t.Errorf("without the server:\n%s", text)
	}
}
