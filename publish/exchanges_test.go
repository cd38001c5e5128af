package publish

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
	"github.com/cdcpub/cdcpub/router"
)

func to(exchange, id string) router.Message {
	m := message(id)
	m.Exchange = exchange
	return m
}

// declarations is a Declare script that knows some exchanges.
type declarations struct {
	mu     sync.Mutex
	exist  map[string]bool
	asked  map[string]int
	active int
}

func (d *declarations) answer(_ *fakebroker.Conn, exchange string, passive bool) uint16 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked == nil {
		d.asked = make(map[string]int)
	}
	d.asked[exchange]++
	switch {
	case !passive:
		d.active++
		d.exist[exchange] = true
	case exchange == "forbidden":
		return 403
	case !d.exist[exchange]:
		return 404
	}
	return 0
}

func TestAMissingExchangeConcernsOnlyItsOwnMessages(t *testing.T) {
	d := &declarations{exist: map[string]bool{"orders": true}}
	r, _ := withBroker(t, fakebroker.Script{Declare: d.answer, Publish: func(m fakebroker.Message) {
		if m.Exchange != "orders" && m.Exchange != "" {
			t.Errorf("message %s was sent to exchange %q", m.ID, m.Exchange)
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single)
	r.publish(to("orders", "a"), to("missing", "b"), to("", "c"), to("forbidden", "d"), to("orders", "e"), to("missing", "f"))
	r.wantKinds(confirmed, returned, confirmed, returned, confirmed, returned)
	r.wantFIFO()
	want := `exchange "missing" does not exist: Exception (404) Reason: "scripted refusal of exchange missing"`
	if got := r.outcomes[1].Err.Error(); got != want {
		t.Errorf("error is %q, want %q", got, want)
	}
	want = `check exchange "forbidden": Exception (403) Reason: "scripted refusal of exchange forbidden"`
	if got := r.outcomes[3].Err.Error(); got != want {
		t.Errorf("error is %q, want %q", got, want)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked["orders"] != 1 || d.asked["missing"] != 1 {
		t.Errorf("each should have been asked for once: %v", d.asked)
	}
}

func TestAnExchangeThatAppearsIsNoticed(t *testing.T) {
	d := &declarations{exist: map[string]bool{}}
	r, _ := withBroker(t, fakebroker.Script{Declare: d.answer}, single)
	r.publish(to("late", "a"))
	r.wantKinds(returned)
	d.mu.Lock()
	d.exist["late"] = true
	d.mu.Unlock()
	start := time.Now()
	until(t, "the negative answer is forgotten", func() bool {
		seq := r.next
		r.publish(to("late", "b"))
		r.settle()
		return r.outcomes[seq].Kind == router.Confirmed
	})
	if took := time.Since(start); took < absentFor/2 {
		t.Errorf("noticed after %s: the broker is asked too often", took)
	}
}

func TestDeclareCreatesWhatIsMissingAndOnlyThat(t *testing.T) {
	d := &declarations{exist: map[string]bool{"old": true}}
	r, _ := withBroker(t, fakebroker.Script{Declare: d.answer}, single, func(c *Config) { c.Declare = true })
	r.publish(to("old", "a"), to("new", "b"), to("new", "c"))
	r.wantKinds(confirmed, confirmed, confirmed)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.active != 1 {
		t.Errorf("%d exchanges were declared, want 1", d.active)
	}
}

func TestASlowCheckHoldsUpOnlyTheLaneThatNeedsIt(t *testing.T) {
	release := make(chan struct{})
	r, _ := withBroker(t, fakebroker.Script{Declare: func(_ *fakebroker.Conn, _ string, _ bool) uint16 {
		<-release
		return 0
	}}, func(c *Config) { c.Lanes, c.Connections = 2, 1 })
	slow, quick := to("slow", "slow"), message("quick")
	slow.OrderKey, quick.OrderKey = "a", "b"
	if laneOf("a", 2) == laneOf("b", 2) {
		t.Fatal("keys share a lane")
	}
	r.publish(slow, quick)
	select {
	case batch := <-r.p.Outcomes():
		r.take(batch)
	case <-time.After(limit):
		t.Fatal("the other lane was held up")
	}
	if r.outcomes[1].Kind != router.Confirmed {
		t.Errorf("outcomes %v", r.outcomes)
	}
	close(release)
	r.wantKinds(confirmed, confirmed)
}

func TestALostControlConnectionIsNoAnswer(t *testing.T) {
	var asked atomic.Int32
	r, _ := withBroker(t, fakebroker.Script{Declare: func(c *fakebroker.Conn, _ string, _ bool) uint16 {
		if asked.Add(1) < 3 {
			c.Cut()
		}
		return 0
	}}, single)
	r.publish(to("orders", "a"))
	r.wantKinds(confirmed)
}

// The exchange is deleted after it was checked, with messages in flight.
func TestADeletedExchangeIsCheckedAgain(t *testing.T) {
	d := &declarations{exist: map[string]bool{"orders": true, "gone": true}}
	r, _ := withBroker(t, fakebroker.Script{Declare: d.answer, Publish: func(m fakebroker.Message) {
		d.mu.Lock()
		defer d.mu.Unlock()
		if m.ID == "last" {
			d.exist["gone"] = false
		}
		if !d.exist[m.Exchange] {
			m.Conn.CloseChannel(m.Channel, 404, "NOT_FOUND - scripted")
			return
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single)
	r.publish(to("orders", "a"), to("gone", "b"), to("orders", "last"), to("gone", "c"), to("orders", "d"))
	r.wantKinds(confirmed, confirmed, confirmed, returned, confirmed)
	r.wantFIFO()
}

func TestUnknownExchangesDoNotPileUp(t *testing.T) {
	x := &exchanges{byName: make(map[string]*exchange), wake: make(chan struct{}, 1)}
	for _, name := range []string{"a", "b", "c"} {
		x.lookup(name)
		x.answer(name, errClosing)
		x.byName[name].until = time.Now().Add(-time.Second)
	}
	x.lookup("d")
	if len(x.byName) != 1 {
		t.Errorf("%d exchanges are remembered, want the pending one", len(x.byName))
	}
}
