package wal

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

func lsn(v offsets.LSN) *offsets.LSN { return &v }

// situation is one start: what was saved and what was found. The healthy one
// streams from 0/200; each case breaks one thing.
type situation struct {
	cfg   Config
	saved offsets.Checkpoint
	found Findings
}

func healthy() *situation {
	source := offsets.Source{
		SystemID: "7001", Timeline: 1, Database: "shop", Slot: "cdcpub", Publication: "cdcpub", PublicationOID: 500,
		Tables: []offsets.Table{{Name: "public.outbox", OID: 600, PublicationRel: 700}}, Scope: "a",
	}
	saved := source
	saved.Tables = slices.Clone(source.Tables)
	return &situation{
		cfg:   Config{Slot: "cdcpub", Publication: "cdcpub", Tables: []Table{{Name: "public.outbox"}}},
		saved: offsets.Checkpoint{Source: saved, Epoch: 3, Phase: offsets.PhaseStreaming, Pos: offsets.Position{LSN: 0x200}},
		found: Findings{
			Source: source, WALEnd: 0x300, WALLevel: "logical", ApplicationName: "cdcpub",
			Role: Role{Name: "cdcpub", Replication: true}, Admin: "postgres", Slots: Limit{1, 10}, Senders: Limit{1, 10}, Standbys: []string{},
			Slot:        &Slot{Plugin: "pgoutput", Type: "logical", Database: "shop", ConfirmedFlush: lsn(0x100), WALStatus: "reserved"},
			Publication: &Publication{OID: 500, Owner: "shop", Insert: true, ViaRoot: true, Tables: []string{"public.outbox"}},
			Tables: []TableState{{
				Name: "public.outbox", OID: 600, Owner: "shop", Kind: "r", Persistence: "p", RelOID: 700, Published: true,
				Columns: []outbox.Column{{Name: "id", Type: 2950}, {Name: "aggregatetype", Type: 1043}, {Name: "aggregateid", Type: 1043},
					{Name: "type", Type: 1043}, {Name: "payload", Type: 3802}},
			}},
		},
	}
}

func (s *situation) decide() (Plan, error) { return Decide(s.cfg, s.saved, s.found) }

func TestDecidePlans(t *testing.T) {
	inside := offsets.Position{LSN: 0x200, Tx: 0x280, Done: 7, Last: offsets.Row{Table: "public.outbox", ID: "x"}}
	for name, tc := range map[string]struct {
		make   func(*situation)
		action Action
		pos    offsets.Position
	}{
		"nothing saved and no slot: create it": {
			func(s *situation) { s.saved, s.found.Slot = offsets.Checkpoint{}, nil },
			ActionCreate, offsets.Position{},
		},
		"died before the slot was made: create it": {
			func(s *situation) {
				s.saved.Phase, s.saved.Pos, s.found.Slot = offsets.PhaseCreating, offsets.Position{}, nil
			},
			ActionCreate, offsets.Position{},
		},
		"died before the slot was made, then the tables were changed: create it": {
			func(s *situation) {
				s.saved.Phase, s.saved.Pos, s.found.Slot = offsets.PhaseCreating, offsets.Position{}, nil
				s.saved.Source.PublicationOID, s.saved.Source.Tables = 1, nil
			},
			ActionCreate, offsets.Position{},
		},
		"died between making the slot and saving it: its position is the beginning": {
			func(s *situation) { s.saved.Phase, s.saved.Pos = offsets.PhaseCreating, offsets.Position{} },
			ActionSnapshot, offsets.Position{LSN: 0x100},
		},
		"died in the snapshot: again, then stream from the slot's beginning": {
			func(s *situation) { s.saved.Phase, s.saved.Pos = offsets.PhaseSnapshot, inside },
			ActionSnapshot, offsets.Position{LSN: 0x200},
		},
		"the server confirmed less than was saved: stream from what was saved": {
			func(*situation) {}, ActionStream, offsets.Position{LSN: 0x200},
		},
		"confirmed, saved and end of WAL are equal: nothing is missing": {
			func(s *situation) { s.found.Slot.ConfirmedFlush, s.found.WALEnd = lsn(0x200), 0x200 },
			ActionStream, offsets.Position{LSN: 0x200},
		},
		"saved inside a transaction: go on inside it": {
			func(s *situation) { s.saved.Pos = inside },
			ActionStream, inside,
		},
		"the scope changed: read the transaction whole, its events count differently": {
			func(s *situation) { s.saved.Pos, s.found.Source.Scope = inside, "b" },
			ActionStream, offsets.Position{LSN: 0x200},
		},
		"a real synchronous standby with another name does not matter": {
			func(s *situation) { s.found.SyncStandbys = "ANY 1 (s1)" },
			ActionStream, offsets.Position{LSN: 0x200},
		},
		"a partitioned table published via its root is a table like any other": {
			func(s *situation) { s.found.Tables[0].Kind = "p" },
			ActionStream, offsets.Position{LSN: 0x200},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := healthy()
			tc.make(s)
			got, err := s.decide()
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(Plan{Action: tc.action, Pos: tc.pos, Source: s.found.Source}, got); d != "" {
				t.Errorf("plan (-want +got):\n%s", d)
			}
		})
	}
}

// refusalCase breaks a start. says is what an operator needs to read.
type refusalCase struct {
	make  func(*situation)
	cause Cause
	says  []string
}

func checkRefusals(t *testing.T, cases map[string]refusalCase) {
	t.Helper()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := healthy()
			tc.make(s)
			plan, err := s.decide()
			var refusal *Refusal
			if !errors.As(err, &refusal) {
				t.Fatalf("Decide = %+v, %v; want a refusal", plan, err)
			}
			if refusal.Cause != tc.cause {
				t.Errorf("refused because of %s, want %s: %v", refusal.Cause, tc.cause, err)
			}
			for _, want := range tc.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the refusal %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestDecideRefusesAPositionAndASlotThatDisagree(t *testing.T) {
	checkRefusals(t, map[string]refusalCase{
		"nothing saved but the slot exists": {
			func(s *situation) { s.saved = offsets.Checkpoint{} }, Gap, []string{"0/100", "another connector's", "source.slot"},
		},
		"the slot was confirmed beyond what was saved": {
			func(s *situation) { s.found.Slot.ConfirmedFlush = lsn(0x201) }, Gap, []string{"0/201", "0/200"},
		},
		"the slot was confirmed beyond what was saved in the snapshot": {
			func(s *situation) {
				s.saved.Phase, s.found.Slot.ConfirmedFlush = offsets.PhaseSnapshot, lsn(0x201)
			}, Gap, []string{"0/201", "0/200"},
		},
		"the saved position lies beyond the end of the log": {
			func(s *situation) { s.found.WALEnd = 0x1FF }, Gap, []string{"0/200", "0/1FF"},
		},
		"the slot is gone": {
			func(s *situation) { s.found.Slot = nil }, SlotLost, []string{"does not exist", "0/200", "teardown"},
		},
		"the slot is gone in the snapshot": {
			func(s *situation) { s.saved.Phase, s.found.Slot = offsets.PhaseSnapshot, nil }, SlotLost, []string{"does not exist"},
		},
		"the slot's log was removed": {
			func(s *situation) { s.found.Slot.WALStatus = "lost" }, SlotLost, []string{"lost", "0/200"},
		},
		"the slot was invalidated, as PostgreSQL 17 says it": {
			func(s *situation) { s.found.Slot.InvalidationReason = "idle_timeout" }, SlotLost, []string{"idle_timeout"},
		},
		"the slot conflicts with recovery, as PostgreSQL 16 says it": {
			func(s *situation) { s.found.Slot.Conflicting = true }, SlotLost, []string{"invalidated"},
		},
		"the slot that was being created is invalidated already": {
			func(s *situation) { s.saved.Phase, s.found.Slot.WALStatus = offsets.PhaseCreating, "lost" }, SlotLost, []string{"lost"},
		},
		"the slot has no confirmed position": {
			func(s *situation) { s.found.Slot.ConfirmedFlush = nil }, SlotLost, []string{"no confirmed position"},
		},
	})
}

func TestDecideRefusesASlotOfAnotherKind(t *testing.T) {
	checkRefusals(t, map[string]refusalCase{
		"the slot belongs to another plugin": {
			func(s *situation) { s.found.Slot.Plugin = "wal2json" }, Setup, []string{"wal2json", "source.slot"},
		},
		"the slot belongs to another database": {
			func(s *situation) { s.found.Slot.Database = "other" }, Setup, []string{"other", "shop"},
		},
		"the slot is physical": {
			func(s *situation) { s.found.Slot.Type = "physical" }, Setup, []string{"physical"},
		},
		"the slot is temporary":                  {func(s *situation) { s.found.Slot.Temporary = true }, Setup, []string{"temporary"}},
		"the slot decodes prepared transactions": {func(s *situation) { s.found.Slot.TwoPhase = true }, Setup, []string{"two_phase"}},
		"another process reads from the slot": {
			func(s *situation) { s.found.Slot.Active, s.found.Slot.ActivePID = true, 4711 }, SlotBusy, []string{"4711"},
		},
		"another connector with the same default names reads from the slot": {
			func(s *situation) {
				s.saved, s.found.Slot.Active, s.found.Slot.ActivePID = offsets.Checkpoint{}, true, 4711
			}, Gap, []string{"4711", "source.slot"},
		},
		"a second service with the default names is told whom the slot serves": {
			func(s *situation) {
				s.saved, s.found.Slot.Active, s.found.Slot.ActivePID = offsets.Checkpoint{}, true, 4711
				s.found.Publication.Tables = []string{"public.orders_outbox"}
			}, Gap, []string{"serves public.orders_outbox", "4711", "CDCPUB_SOURCE_SLOT=cdcpub_shop_outbox", "source.slot"},
		},
		"a second service in another database is told so before anything is said of its own": {
			func(s *situation) {
				s.saved, s.found.Slot.Database, s.found.Publication = offsets.Checkpoint{}, "other", nil
			}, Setup, []string{`database "other"`, "source.slot"},
		},
	})
}

func TestDecideRefusesAnotherIdentity(t *testing.T) {
	checkRefusals(t, map[string]refusalCase{
		"another cluster": {
			func(s *situation) { s.found.Source.SystemID = "7002" }, Gap, []string{"system identifier", "7001", "7002"},
		},
		"another database": {
			func(s *situation) { s.found.Source.Database, s.found.Slot.Database = "other", "other" }, Gap, []string{"database", "shop", "other"},
		},
		"another timeline": {func(s *situation) { s.found.Source.Timeline = 2 }, Gap, []string{"timeline"}},
		"another slot":     {func(s *situation) { s.found.Source.Slot = "other" }, Gap, []string{"slot"}},
		"another publication": {
			func(s *situation) { s.found.Source.Publication = "other" }, Gap, []string{"publication", "other"},
		},
		"the publication was made anew": {
			func(s *situation) { s.found.Source.PublicationOID = 501 }, Gap, []string{"500", "501", "teardown"},
		},
		"the table was made anew": {
			func(s *situation) { s.found.Source.Tables[0].OID = 601 }, Gap, []string{"unseen"},
		},
		"the table was taken out of the publication and put back": {
			func(s *situation) { s.found.Source.Tables[0].PublicationRel = 701 }, Gap, []string{"unseen"},
		},
		"a table was added behind the slot": {
			func(s *situation) {
				s.found.Source.Tables = append(s.found.Source.Tables, offsets.Table{Name: "public.more", OID: 601, PublicationRel: 701})
			}, Gap, []string{"public.more"},
		},
	})
}

func TestDecideRefusesAServerThatIsNotSetUp(t *testing.T) {
	checkRefusals(t, map[string]refusalCase{
		"wal_level is too low": {func(s *situation) { s.found.WALLevel = "replica" }, Setup, []string{"replica", "ALTER SYSTEM"}},
		"the server is a standby": {
			func(s *situation) { s.found.InRecovery = true }, Setup, []string{"standby", "target_session_attrs"},
		},
		"every walsender is a synchronous standby": {
			func(s *situation) { s.found.SyncStandbys = "*" }, Setup, []string{"'*'", "freeze"},
		},
		"our name is among the synchronous standbys": {
			func(s *situation) { s.found.SyncStandbys = "FIRST 1 (cdcpub, x)" }, Setup, []string{"freeze"},
		},
		"the role may not replicate": {
			func(s *situation) { s.found.Role.Replication = false }, Setup, []string{`as role postgres run: ALTER ROLE "cdcpub" REPLICATION`},
		},
		"no slot is left for the first start": {
			func(s *situation) { s.saved, s.found.Slot, s.found.Slots = offsets.Checkpoint{}, nil, Limit{10, 10} }, Setup,
			[]string{"all 10", "max_replication_slots = 14", "restart"},
		},
		"a provider has its own way to wal_level": {
			func(s *situation) { s.found.WALLevel, s.found.Provider, s.found.Admin = "replica", AmazonRDS, "" }, Setup, []string{"rds.logical_replication"},
		},
		"a provider has its own way to the right to replicate": {
			func(s *situation) { s.found.Role.Replication, s.found.Provider, s.found.Admin = false, AmazonRDS, "" }, Setup, []string{"GRANT rds_replication"},
		},
		"our name is among them in quotes and capitals": {
			func(s *situation) { s.found.SyncStandbys = `ANY 1 (s1,"CdcPub")` }, Setup, []string{"freeze"},
		},
	})
}

func TestDecideRefusesAPublicationThatWouldMissRows(t *testing.T) {
	checkRefusals(t, map[string]refusalCase{
		"the publication was dropped behind the slot": {
			func(s *situation) { s.found.Publication, s.found.Source.PublicationOID = nil, 0 }, Gap, []string{"dropped behind", "unseen"},
		},
		"the publication is missing and nothing exists yet": {
			func(s *situation) { s.saved, s.found.Slot, s.found.Publication = offsets.Checkpoint{}, nil, nil }, Setup, []string{"cdcpub init"},
		},
		"the publication is missing and a slot that is not ours exists": {
			func(s *situation) { s.saved, s.found.Publication = offsets.Checkpoint{}, nil }, Gap, []string{"nothing is saved here"},
		},
		"the publication was dropped after the slot": {
			func(s *situation) { s.found.Slot, s.found.Publication = nil, nil }, SlotLost, []string{"does not exist", "lost"},
		},
		"the publication has no inserts": {
			func(s *situation) { s.found.Publication.Insert = false }, Setup, []string{`ALTER PUBLICATION "cdcpub" SET (publish = 'insert')`},
		},
		"the publication serves another table": {
			func(s *situation) {
				s.found.Publication.Tables, s.found.Tables[0].Published, s.found.Tables[0].RelOID = []string{"public.orders_outbox"}, false, 0
			}, Setup, []string{"public.orders_outbox", "public.outbox"},
		},
		"the publication serves another table and no slot streams it": {
			func(s *situation) {
				s.saved, s.found.Slot = offsets.Checkpoint{}, nil
				s.found.Publication.Tables, s.found.Tables[0].Published, s.found.Tables[0].RelOID = []string{"public.orders_outbox"}, false, 0
			}, Setup, []string{"public.orders_outbox", `ALTER PUBLICATION "cdcpub" ADD TABLE "public"."outbox"`, "as role shop"},
		},
		"the publication has the partitions but not their root": {
			func(s *situation) {
				s.found.Tables[0].Kind, s.found.Tables[0].Published, s.found.Publication.ViaRoot = "p", false, false
			}, Setup, []string{"publish_via_partition_root = true"},
		},
		"the publication leaves columns out": {func(s *situation) { s.found.Tables[0].ColumnList = true }, Setup, []string{"column list"}},
		"the publication filters rows":       {func(s *situation) { s.found.Tables[0].RowFilter = true }, Setup, []string{"row filter"}},
		"the table does not exist": {func(s *situation) {
			s.saved, s.found.Slot = offsets.Checkpoint{}, nil
			s.found.Tables[0] = TableState{Name: "public.outbox"}
		}, Setup, []string{"--create-table"}},
		"the table of the saved position is gone": {func(s *situation) {
			s.found.Tables[0] = TableState{Name: "public.outbox"}
		}, Gap, []string{"renamed or dropped", "its name back"}},
		"the table is a view":   {func(s *situation) { s.found.Tables[0].Kind = "v" }, Setup, []string{"not a table"}},
		"the table is unlogged": {func(s *situation) { s.found.Tables[0].Persistence = "u" }, Setup, []string{"unlogged"}},
		"a required column is missing": {
			func(s *situation) { s.found.Tables[0].Columns = s.found.Tables[0].Columns[:4] }, Setup, []string{"payload", "aggregateid"},
		},
	})
}

func TestWithoutStandbyKeepsTheRealOnes(t *testing.T) {
	for name, tc := range map[string]struct {
		names     string
		connected []string
		want      string
		ok        bool
	}{
		"alone":                          {"cdcpub", []string{}, "", true},
		"beside another":                 {"FIRST 1 (cdcpub, s1)", []string{}, "FIRST 1 (s1)", true},
		"in quotes":                      {`ANY 1 (s1,"CdcPub")`, nil, "ANY 1 (s1)", true},
		"old form with a number":         {"2 (cdcpub, s1, s2)", nil, "2 (s1, s2)", true},
		"more wanted than are left":      {"ANY 2 (cdcpub, s1)", nil, "ANY 1 (s1)", true},
		"a plain list":                   {"s1, cdcpub, s2", nil, "s1, s2", true},
		"every standby, two connected":   {"*", []string{"s1", "S-2"}, `"s1", "S-2"`, true},
		"every standby, none connected":  {"FIRST 1 (*)", []string{}, "", true},
		"every standby, we may not look": {"*", nil, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := withoutStandby(tc.names, "cdcpub", tc.connected)
			if got != tc.want || ok != tc.ok {
				t.Errorf("withoutStandby(%q) = %q, %t; want %q, %t", tc.names, got, ok, tc.want, tc.ok)
			}
		})
	}
}

// One round of mending must be enough, so nothing may hide behind something else.
func TestProblemsListsAllOfThem(t *testing.T) {
	s := healthy()
	s.found.WALLevel, s.found.SyncStandbys, s.found.Role.Replication = "minimal", "*", false
	s.found.Tables[0].Persistence, s.found.Publication.Insert, s.found.Slot.TwoPhase = "u", false, true
	var about []string
	for _, r := range s.found.Problems(s.cfg) {
		about = append(about, r.About)
		if r.Cause != Setup || r.Hint == "" {
			t.Errorf("refusal %+v: want a set-up with a hint", r)
		}
	}
	want := []string{AboutWALLevel, AboutSynchronous, AboutRole, "table public.outbox", "publication cdcpub", "slot cdcpub"}
	if d := cmp.Diff(want, about); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
}
