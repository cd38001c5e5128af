package publish

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
	"github.com/cdcpub/cdcpub/router"
)

// chaos is a broker that does one of everything at random, and knows what it
// has said of each message.
type chaos struct {
	mu     sync.Mutex
	random *rand.Rand
	cuts   int // of connections still to come; each costs a growing backoff
	seen   recorder
	said   map[string]map[router.Kind]bool // by message_id
	held   map[*fakebroker.Conn]map[uint16][]fakebroker.Message
}

func (c *chaos) publish(m fakebroker.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen.saw(m.ID)
	n := c.random.IntN(1000)
	switch {
	case n < 4 && c.cuts > 0:
		c.cuts--
		delete(c.held, m.Conn)
		if n < 2 {
			m.Conn.Cut()
		} else {
			m.Conn.Close(320, "CONNECTION_FORCED - scripted")
		}
	case n < 7:
		delete(c.held[m.Conn], m.Channel)
		m.Conn.CloseChannel(m.Channel, []uint16{403, 404, 406, 541}[c.random.IntN(4)], "scripted")
	case n < 40:
		c.say(m, router.Nacked)
		m.Conn.Nack(m.Channel, m.Tag, false)
	case n < 80:
		c.say(m, router.Returned)
		m.Conn.Return(m)
		m.Conn.Ack(m.Channel, m.Tag, false)
	case n < 500: // later, together with others
		if c.held[m.Conn] == nil {
			c.held[m.Conn] = make(map[uint16][]fakebroker.Message)
		}
		held := append(c.held[m.Conn][m.Channel], m)
		c.held[m.Conn][m.Channel] = held
		if len(held) == 1 {
			time.AfterFunc(time.Duration(c.random.IntN(3000))*time.Microsecond, func() { c.release(m.Conn, m.Channel) })
		}
	default:
		c.say(m, router.Confirmed)
		m.Conn.Ack(m.Channel, m.Tag, false)
	}
}

// release acknowledges what is held, all at once. What was nacked or returned in
// between is spanned by it.
func (c *chaos) release(conn *fakebroker.Conn, channel uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	held := c.held[conn][channel]
	if len(held) == 0 {
		return
	}
	c.held[conn][channel] = nil
	for _, m := range held {
		c.say(m, router.Confirmed)
	}
	conn.Ack(channel, held[len(held)-1].Tag, true)
}

func (c *chaos) say(m fakebroker.Message, kind router.Kind) {
	if c.said[m.ID] == nil {
		c.said[m.ID] = make(map[router.Kind]bool)
	}
	c.said[m.ID][kind] = true
}

func TestRandomFaultsNeitherLoseNorInventNorRepeatAnOutcome(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := &chaos{
		random: rand.New(rand.NewPCG(seed, 1)),
		cuts:   5,
		said:   make(map[string]map[router.Kind]bool),
		held:   make(map[*fakebroker.Conn]map[uint16][]fakebroker.Message),
	}
	const total, keys, window = 3000, 40, 300
	r, _ := withBroker(t, fakebroker.Script{Publish: c.publish}, func(cfg *Config) {
		cfg.Window, cfg.PerChannel, cfg.ConfirmTimeout = window, 100, 2*time.Second
	})
	byKey := make(map[string][]string)
	deadline := time.After(2 * time.Minute)
	for r.next < total || len(r.outcomes) < total {
		for r.next < total && r.next-uint64(len(r.outcomes)) < window {
			m := message(fmt.Sprintf("m%d", r.next))
			m.OrderKey = fmt.Sprint("k", r.next%keys)
			byKey[m.OrderKey] = append(byKey[m.OrderKey], m.ID)
			r.publish(m)
		}
		select {
		case batch := <-r.p.Outcomes():
			r.take(batch)
		case <-deadline:
			t.Fatalf("%d of %d outcomes; stats %+v", len(r.outcomes), total, r.p.Stats())
		}
	}
	r.settle()
	t.Logf("stats %+v", r.p.Stats())

	c.mu.Lock()
	defer c.mu.Unlock()
	for seq, o := range r.outcomes {
		id := fmt.Sprintf("m%d", seq)
		if !c.said[id][o.Kind] && !isIsolated(o) {
			t.Errorf("message %s is %s (%v), but the broker said %v", id, o.Kind, o.Err, c.said[id])
		}
	}
	wantOrderPerKey(t, c.seen.first, byKey)
}

// isIsolated tells the verdict on a message that, by chance, ended two channels.
func isIsolated(o router.Outcome) bool {
	return isCode(o.Err, 403) || isCode(o.Err, 404) || isCode(o.Err, 406)
}

// wantOrderPerKey compares the order of first occurrences with that of Publish,
// for each OrderKey.
func wantOrderPerKey(t *testing.T, first []string, byKey map[string][]string) {
	t.Helper()
	position := make(map[string]int, len(first))
	for i, id := range first {
		position[id] = i + 1
	}
	for key, ids := range byKey {
		last := 0
		for _, id := range ids {
			at := position[id]
			if at == 0 {
				t.Errorf("message %s of %s never arrived", id, key)
				continue
			}
			if at < last {
				t.Errorf("message %s of %s arrived after a later one", id, key)
			}
			last = at
		}
	}
}
