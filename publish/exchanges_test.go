package publish

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

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
	x.forbid("forbidden", &amqp.Error{Code: amqp.AccessRefused})
	x.expire("forbidden")
	x.lookup("d")
	if len(x.byName) != 2 || x.byName["d"] == nil || x.byName["forbidden"] == nil {
		t.Errorf("%v are remembered, want the pending one and the one that is to be tried", slices.Collect(maps.Keys(x.byName)))
	}
}

// permissions is a Publish script that ends the channel for messages to the
// exchange "closed", unless it is open.
type permissions struct {
	seen recorder
	open atomic.Bool
}

func (p *permissions) publish(m fakebroker.Message) {
	p.seen.saw(m.ID)
	p.seen.saw(m.Exchange)
	if m.Exchange == "closed" && !p.open.Load() {
		m.Conn.CloseChannel(m.Channel, 403, "ACCESS_REFUSED - scripted")
		return
	}
	m.Conn.Ack(m.Channel, m.Tag, false)
}

// mixed is n messages to the exchange "closed" among n to "open", over all lanes.
func mixed(prefix string, n int) []router.Message {
	var messages []router.Message
	for i, m := range ids(prefix, 2*n) {
		m.OrderKey, m.Exchange = m.ID, []string{"closed", "open"}[i%2]
		messages = append(messages, m)
	}
	return messages
}

func (r *rig) wantOpenOnly(from uint64) {
	r.t.Helper()
	r.settle()
	for seq := from; seq < r.next; seq++ {
		o := r.outcomes[seq]
		want := []router.Kind{returned, confirmed}[(seq-from)%2]
		if o.Kind != want || want == returned && !isCode(o.Err, 403) {
			r.t.Errorf("message %d is %s (%v), want %s", seq, o.Kind, o.Err, want)
		}
	}
}

// expire ends forbiddenFor for an exchange.
func (x *exchanges) expire(name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := *x.byName[name]
	e.until = time.Now().Add(-time.Second)
	x.byName[name] = &e
}

func TestAForbiddenExchangeIsTriedByOneMessageAtATime(t *testing.T) {
	var p permissions
	r, _ := withBroker(t, fakebroker.Script{Publish: p.publish})
	r.publish(mixed("found", 100)...)
	r.wantOpenOnly(0)
	// Each of the four lanes may have sent some before the first had its verdict.
	found := p.seen.times("closed")
	if found > 4*(1+maxKills) {
		t.Errorf("%d messages were sent to the exchange before it was found to be forbidden", found)
	}

	r.p.exchanges.expire("closed")
	second := r.next
	messages := mixed("still", 100)
	r.publish(messages...)
	r.wantOpenOnly(second)
	if tried := p.seen.times("closed") - found; tried != maxKills {
		t.Errorf("the exchange was tried %d times, want one message alone, %d times", tried, maxKills)
	}
	for _, m := range messages {
		if n := p.seen.times(m.ID); m.Exchange == "open" && n != 1 {
			t.Errorf("innocent message %s was sent %d times", m.ID, n)
		}
	}

	p.open.Store(true)
	r.p.exchanges.expire("closed")
	r.publish(to("closed", "trial"))
	r.settle()
	third := r.next
	r.publish(mixed("after", 100)...)
	r.settle()
	for seq := third - 1; seq < r.next; seq++ {
		if o := r.outcomes[seq]; o.Kind != confirmed {
			t.Errorf("message %d is %s (%v), but the exchange is open", seq, o.Kind, o.Err)
		}
	}
}

func TestATrialOutlivesALostConnection(t *testing.T) {
	var p permissions
	var cut atomic.Bool
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if m.ID == "trial" && cut.CompareAndSwap(false, true) {
			m.Conn.Cut()
			return
		}
		p.publish(m)
	}}, single)
	r.publish(to("closed", "a"))
	r.wantKinds(returned)
	p.open.Store(true)
	r.p.exchanges.expire("closed")
	r.publish(to("closed", "trial"))
	r.wantKinds(returned, confirmed)
}
