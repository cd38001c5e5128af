package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeSource hands out what the test sends and remembers acknowledgements.
type fakeSource struct {
	batches chan outbox.Batch
	err     error
	acks    []offsets.LSN
	store   *fakeStore // to check Save before Ack
	t       *testing.T
}

func (s *fakeSource) Batches() <-chan outbox.Batch { return s.batches }
func (s *fakeSource) Err() error                   { return s.err }
func (s *fakeSource) Ack(lsn offsets.LSN) {
	if last := s.store.last(); last.Pos.LSN != lsn {
		s.t.Errorf("acknowledged %s while the saved position is %s", lsn, last.Pos)
	}
	s.acks = append(s.acks, lsn)
}
func (s *fakeSource) acked() offsets.LSN {
	if len(s.acks) == 0 {
		return 0
	}
	return s.acks[len(s.acks)-1]
}

// fakePublisher keeps messages until the test settles them, or answers at once
// by its script.
type fakePublisher struct {
	outcomes chan []router.Outcome
	sent     []sent
	answer   func(sent) router.Kind // 0: keep

	mu       sync.Mutex
	unsettle map[string]uint64 // event ID -> seq, at the publisher
}

type sent struct {
	seq uint64
	id  string
	key string
	at  time.Time
}

func (p *fakePublisher) Publish(seq uint64, m router.Message) {
	s := sent{seq, m.ID, m.RoutingKey, time.Now()}
	p.mu.Lock()
	p.sent = append(p.sent, s)
	p.unsettle[m.ID] = seq
	p.mu.Unlock()
	if p.answer != nil {
		if k := p.answer(s); k != 0 {
			p.settle(k, m.ID)
		}
	}
}

func (p *fakePublisher) Outcomes() <-chan []router.Outcome { return p.outcomes }

// settle reports outcomes for messages that are out.
func (p *fakePublisher) settle(k router.Kind, ids ...string) {
	var out []router.Outcome
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		seq, ok := p.unsettle[id]
		if !ok {
			panic("settle of " + id + ", which is not out")
		}
		delete(p.unsettle, id)
		var err error
		if k != router.Confirmed {
			err = fmt.Errorf("%s by the test", k)
		}
		out = append(out, router.Outcome{Seq: seq, Kind: k, Err: err})
	}
	p.outcomes <- out
}

// unsettled lists what is out, in a stable order.
func (p *fakePublisher) unsettled() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.unsettle))
}

func (p *fakePublisher) ids() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := ""
	for _, m := range p.sent {
		s += m.id + " "
	}
	return s
}

// fakeStore remembers every checkpoint that was saved.
type fakeStore struct {
	mu    sync.Mutex
	fail  error
	block chan struct{}
	saves []offsets.Checkpoint
}

// failWith makes every Save fail until it is called with nil.
func (s *fakeStore) failWith(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = err
}

// blockUntil makes every Save wait for the channel to be closed.
func (s *fakeStore) blockUntil(c chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.block = c
}

func (s *fakeStore) Save(ctx context.Context, cp offsets.Checkpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if block := s.block; block != nil {
		s.mu.Unlock()
		select {
		case <-block:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
	if err := cmp.Or(ctx.Err(), s.fail); err != nil {
		return err
	}
	s.saves = append(s.saves, cp)
	return nil
}

// count is the number of checkpoints saved.
func (s *fakeStore) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.saves)
}

func (s *fakeStore) last() offsets.Checkpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.saves) == 0 {
		return offsets.Checkpoint{}
	}
	return s.saves[len(s.saves)-1]
}

// rig is a relay with fakes around it, inside a synctest bubble: time passes
// only when everything waits.
type rig struct {
	t      *testing.T
	relay  *Relay
	src    *fakeSource
	pub    *fakePublisher
	store  *fakeStore
	cancel context.CancelFunc
	result chan error
	lsn    offsets.LSN
}

const startLSN = 1000

func start(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	store := &fakeStore{}
	r := &rig{
		t: t, store: store,
		src:    &fakeSource{batches: make(chan outbox.Batch), store: store, t: t},
		pub:    &fakePublisher{outcomes: make(chan []router.Outcome, 10_000), unsettle: map[string]uint64{}},
		result: make(chan error, 1),
		lsn:    startLSN,
	}
	r.run(change, Stage{r.src, offsets.PhaseStreaming})
	return r
}

func (r *rig) run(change func(*Config), stages ...Stage) {
	cfg := Config{
		Window: 8, WindowBytes: DefaultWindowBytes, Span: 2 * outbox.MaxBatchEvents, OnUnroutable: Retry, OnNack: Retry,
		Interval: time.Second, Every: 2000, ShutdownTimeout: 8 * time.Second, Logger: hclog.NewNullLogger(),
	}
	if change != nil {
		change(&cfg)
	}
	rt, err := router.New(router.Config{})
	if err != nil {
		r.t.Fatal(err)
	}
	if r.relay, err = New(cfg, rt, r.pub, r.store); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(r.t.Context())
	r.cancel = cancel
	cp := offsets.Checkpoint{Epoch: 1, Phase: stages[0].Phase, Pos: offsets.Position{LSN: startLSN}}
	go func() { r.result <- r.relay.Run(ctx, cp, stages...) }()
	synctest.Wait()
}

// batch sends one transaction of events "aggregate:id" and waits until nothing
// moves any more.
func (r *rig) batch(events ...string) offsets.LSN {
	r.t.Helper()
	r.send(r.tx(events...))
	return r.lsn
}

func (r *rig) tx(events ...string) outbox.Batch {
	restart := r.lsn
	r.lsn += 100
	b := outbox.Batch{Through: offsets.Position{LSN: r.lsn}}
	for i, e := range events {
		agg, id := e[:1], e
		b.Events = append(b.Events, outbox.Event{
			ID: id, Aggregate: outbox.Aggregate{Type: "t", ID: agg}, Table: "public.outbox",
			Position: offsets.Position{LSN: restart, Tx: r.lsn - 10, Done: uint64(i + 1), Last: offsets.Row{Table: "public.outbox", ID: id}},
		})
	}
	return b
}

func (r *rig) send(b outbox.Batch) {
	r.t.Helper()
	select {
	case r.src.batches <- b:
	case <-time.After(time.Minute):
		r.t.Fatal("the relay takes no batch")
	}
	synctest.Wait()
}

// refusesBatch checks that the relay takes nothing for a while.
func (r *rig) refusesBatch() {
	r.t.Helper()
	select {
	case r.src.batches <- r.tx("z1"):
		r.t.Error("the relay took a batch")
	case <-time.After(time.Second):
	}
}

func (r *rig) settle(k router.Kind, ids ...string) {
	r.pub.settle(k, ids...)
	synctest.Wait()
}

// pass lets time go by.
func (r *rig) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// stop cancels and returns what Run returned.
func (r *rig) stop() error {
	r.cancel()
	return <-r.result
}

func (r *rig) wantSent(ids string) {
	r.t.Helper()
	if got := r.pub.ids(); got != ids {
		r.t.Errorf("sent %q, want %q", got, ids)
	}
}

func (r *rig) wantSaved(pos offsets.Position) {
	r.t.Helper()
	if got := r.store.last().Pos; got != pos {
		r.t.Errorf("saved %s, want %s", got, pos)
	}
}

func at(lsn offsets.LSN) offsets.Position { return offsets.Position{LSN: lsn} }

var errTest = errors.New("test")

func bubble(f func(t *testing.T)) func(*testing.T) {
	return func(t *testing.T) { synctest.Test(t, f) }
}
