package publish

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/router"
)

func TestMain(m *testing.M) { os.Exit(rabbittest.Main(m)) }

// limit is how long a test waits for what must happen. After a restart of the
// broker that is its boot, the backoff of a link and that of a lane, each some 10 s.
const limit = time.Minute

// rig is a publisher and what it has reported.
type rig struct {
	t        *testing.T
	p        *Publisher
	next     uint64
	outcomes map[uint64]router.Outcome
	order    []uint64 // of outcomes
}

// single is one lane with room for everything a test sends.
func single(c *Config) { c.Lanes, c.Connections = 1, 1 }

func newRig(t *testing.T, cfg Config, edits ...func(*Config)) *rig {
	t.Helper()
	for _, edit := range edits {
		edit(&cfg)
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return &rig{t: t, p: p, outcomes: make(map[uint64]router.Outcome)}
}

// withBroker is a rig on a scripted broker.
func withBroker(t *testing.T, script fakebroker.Script, edits ...func(*Config)) (*rig, *fakebroker.Broker) {
	t.Helper()
	b := fakebroker.New(script)
	t.Cleanup(b.Close)
	cfg := Config{URLs: []string{"amqp://guest:guest@broker.invalid/"}, Mandatory: true, dial: b.Dial}
	return newRig(t, cfg, edits...), b
}

func message(id string) router.Message {
	return router.Message{RoutingKey: "key", ID: id, Body: []byte(id)}
}

func (r *rig) publish(messages ...router.Message) {
	for _, m := range messages {
		r.p.Publish(r.next, m)
		r.next++
	}
}

// settle waits until everything published so far has an outcome.
func (r *rig) settle() {
	r.t.Helper()
	deadline := time.After(limit)
	for uint64(len(r.outcomes)) < r.next {
		select {
		case batch := <-r.p.Outcomes():
			r.take(batch)
		case <-deadline:
			r.t.Fatalf("%d of %d outcomes after %s; stats %+v", len(r.outcomes), r.next, limit, r.p.Stats())
		}
	}
	select {
	case batch := <-r.p.Outcomes():
		r.t.Fatalf("outcomes beyond one per message: %v", batch)
	default:
	}
}

func (r *rig) take(batch []router.Outcome) {
	r.t.Helper()
	for _, o := range batch {
		if _, twice := r.outcomes[o.Seq]; twice {
			r.t.Fatalf("second outcome for message %d: %v", o.Seq, o)
		}
		if (o.Err == nil) != (o.Kind == router.Confirmed) {
			r.t.Errorf("outcome %s of message %d with error %v", o.Kind, o.Seq, o.Err)
		}
		r.outcomes[o.Seq] = o
		r.order = append(r.order, o.Seq)
	}
}

// wantKinds settles and compares all outcomes, by number of the message.
func (r *rig) wantKinds(want ...router.Kind) {
	r.t.Helper()
	r.settle()
	for seq, kind := range want {
		if got := r.outcomes[uint64(seq)]; got.Kind != kind {
			r.t.Errorf("message %d is %s (%v), want %s", seq, got.Kind, got.Err, kind)
		}
	}
}

func (r *rig) wantFIFO() {
	r.t.Helper()
	for i, seq := range r.order {
		if seq != uint64(i) {
			r.t.Fatalf("outcomes of one lane came in the order %v", r.order)
		}
	}
}

// until polls cond; what it waits for gives no signal.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}

func ids(prefix string, n int) []router.Message {
	messages := make([]router.Message, n)
	for i := range messages {
		messages[i] = message(fmt.Sprint(prefix, i))
	}
	return messages
}

func mustWrap(t *testing.T, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("error is %v, want one that wraps %v", err, target)
	}
}
