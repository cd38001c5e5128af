package publish

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
	"github.com/cdcpub/cdcpub/router"
)

const (
	confirmed = router.Confirmed
	returned  = router.Returned
	nacked    = router.Nacked
	refused   = router.Refused
)

func TestANackBeforeAnAckOfSeveralStaysANack(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		switch m.Tag {
		case 1:
			m.Conn.Ack(m.Channel, 1, false) // opens the window
		case 6:
			m.Conn.Nack(m.Channel, 4, false)
			m.Conn.Ack(m.Channel, 6, true)
		}
	}}, single)
	r.publish(ids("m", 6)...)
	r.wantKinds(confirmed, confirmed, confirmed, nacked, confirmed, confirmed)
	r.wantFIFO()
}

func TestAReturnBeforeTheAckIsReturned(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if !m.Mandatory || m.DeliveryMode != 2 {
			t.Errorf("message %s: mandatory %v, delivery mode %d", m.ID, m.Mandatory, m.DeliveryMode)
		}
		if strings.HasPrefix(m.ID, "lost") {
			m.Conn.Return(m)
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single)
	r.publish(message("a"), message("lost1"), message("b"), message("lost2"))
	r.wantKinds(confirmed, returned, confirmed, returned)
	if got, want := r.outcomes[1].Err.Error(), `returned by the broker: 312 NO_ROUTE (exchange "", routing key "key")`; got != want {
		t.Errorf("error is %q, want %q", got, want)
	}
}

func TestAWindowFullOfReturnsLosesNone(t *testing.T) {
	var messages []fakebroker.Message
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if m.ID == "first" {
			m.Conn.Ack(m.Channel, m.Tag, false)
			return
		}
		m.Conn.Return(m)
		if messages = append(messages, m); len(messages) == 512 {
			m.Conn.Ack(m.Channel, m.Tag, true)
		}
	}}, single)
	r.publish(message("first"))
	r.publish(ids("m", 512)...)
	r.settle()
	if got := r.p.Stats().Returned; got != 512 {
		t.Errorf("%d of 512 messages were returned", got)
	}
}

func TestAMessageThatEndsTheChannelIsFoundAmidInnocentOnes(t *testing.T) {
	for _, c := range []struct {
		name string
		code uint16
		want router.Kind
	}{
		{"403, no right to publish", 403, returned},
		{"404, no such exchange", 404, returned},
		{"406, too large for the broker", 406, refused},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
				if strings.HasPrefix(m.ID, "bad") {
					m.Conn.CloseChannel(m.Channel, c.code, "scripted")
					return
				}
				m.Conn.Ack(m.Channel, m.Tag, false)
			}}, single)
			r.publish(ids("a", 10)...)
			r.publish(message("bad1"), message("b"), message("bad2"))
			r.publish(ids("c", 10)...)
			want := make([]router.Kind, 23)
			for i := range want {
				want[i] = confirmed
			}
			want[10], want[12] = c.want, c.want
			r.wantKinds(want...)
			r.wantFIFO()
			if s := r.p.Stats(); s.Isolations == 0 || s.Confirmed != 21 || s.ConnectionsLost != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// With a pause for each dead channel, and longer ones in a row, this would take
// minutes.
func TestBadMessagesInARowDoNotSlowTheirLane(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if strings.HasPrefix(m.ID, "bad") {
			m.Conn.CloseChannel(m.Channel, 406, "PRECONDITION_FAILED - scripted")
			return
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single)
	r.publish(ids("bad", 100)...)
	r.publish(message("good"))
	r.settle()
	r.wantFIFO()
	if s := r.p.Stats(); s.Refused != 100 || s.Confirmed != 1 {
		t.Errorf("stats %+v", s)
	}
}

// A frame error ends the connection under both lanes.
func TestAMessageThatEndsTheConnectionIsFoundOverLanes(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if strings.HasPrefix(m.ID, "bad") {
			m.Conn.Close(501, "FRAME_ERROR - scripted")
			return
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, func(c *Config) { c.Lanes, c.Connections = 2, 1 })
	var bad []uint64
	for i, m := range ids("m", 40) {
		m.OrderKey = m.ID
		if i == 7 || i == 20 {
			bad = append(bad, r.next)
			m.ID = "bad" + m.ID
		}
		r.publish(m)
	}
	r.settle()
	for _, seq := range bad {
		if got := r.outcomes[seq].Kind; got != refused {
			t.Errorf("message %d is %s, want refused", seq, got)
		}
	}
	if s := r.p.Stats(); s.Confirmed != 38 || s.Refused != 2 {
		t.Errorf("innocent messages were blamed: %+v", s)
	}
}

// recorder notes the order in which message_ids arrive first.
type recorder struct {
	mu    sync.Mutex
	first []string
	count map[string]int
}

func (r *recorder) saw(id string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count == nil {
		r.count = make(map[string]int)
	}
	if r.count[id] == 0 {
		r.first = append(r.first, id)
	}
	r.count[id]++
	return r.count[id]
}

func (r *recorder) times(id string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count[id]
}

func (r *recorder) wantFirst(t *testing.T, messages []router.Message) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, m := range messages {
		if i >= len(r.first) || r.first[i] != m.ID {
			t.Fatalf("first occurrences are %v, want %s at %d", r.first, m.ID, i)
		}
	}
}

func TestADeadChannelIsNoOutcomeAndTheLaneGoesBack(t *testing.T) {
	var seen recorder
	died := false
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		n := seen.saw(m.ID)
		switch {
		case died || m.ID == "m0":
			m.Conn.Ack(m.Channel, m.Tag, false)
			if n > 2 {
				t.Errorf("message %s came %d times", m.ID, n)
			}
		case m.ID == "m19": // the first ten are confirmed
			m.Conn.Ack(m.Channel, 10, true)
			m.Conn.CloseChannel(m.Channel, 541, "INTERNAL_ERROR - scripted")
			died = true
		}
	}}, single)
	messages := ids("m", 40)
	r.publish(messages[:20]...)
	until(t, "the channel has died", func() bool { return r.p.Stats().Resent > 0 })
	r.publish(messages[20:]...)
	r.settle()
	r.wantFIFO()
	seen.wantFirst(t, messages)
	if s := r.p.Stats(); s.Confirmed != 40 || s.Resent != 10 || s.ConnectionsLost != 0 {
		t.Errorf("want 40 confirmed and 10 sent again on the same connection: %+v", s)
	}
	for i := range 10 {
		if n := seen.count[messages[i].ID]; n != 1 {
			t.Errorf("confirmed message %d was sent %d times", i, n)
		}
	}
}

func TestAConfirmThatNeverComesIsWaitedForOnlySoLong(t *testing.T) {
	var seen recorder
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if n := seen.saw(m.ID); m.ID == "m3" && n < 3 {
			return
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single, func(c *Config) { c.ConfirmTimeout = 50 * time.Millisecond })
	messages := ids("m", 10)
	r.publish(messages...)
	r.settle()
	r.wantFIFO()
	seen.wantFirst(t, messages)
	s := r.p.Stats()
	if s.Confirmed != 10 || s.ConnectionsLost != 2 {
		t.Errorf("want 10 confirmed over two lost connections: %+v", s)
	}
	if want := "no confirm from the broker for 100ms"; s.LastError != want {
		t.Errorf("last error is %q, want %q: the timeout doubles", s.LastError, want)
	}
}

func TestABlockedConnectionDoesNotCountAsSilence(t *testing.T) {
	c := &conn{}
	sent := time.Now().Add(-time.Minute)
	if left := c.patience(sent, time.Second); left > 0 {
		t.Errorf("%s left for a message sent a minute ago", left)
	}
	c.setBlocked(true)
	c.setBlocked(true)
	if left := c.patience(sent, time.Second); left != time.Second {
		t.Errorf("%s left while blocked, want all of 1s", left)
	}
	c.setBlocked(false)
	if left := c.patience(sent, time.Second); left < 900*time.Millisecond {
		t.Errorf("%s left right after the end of blocking, want about 1s", left)
	}
}

func TestTheSameMessageIDIsNeverTwiceInFlight(t *testing.T) {
	var mu sync.Mutex
	unconfirmed := make(map[string]int)
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		mu.Lock()
		defer mu.Unlock()
		if unconfirmed[m.ID]++; unconfirmed[m.ID] > 1 {
			t.Errorf("message_id %s came while it was unconfirmed", m.ID)
		}
		time.AfterFunc(5*time.Millisecond, func() {
			mu.Lock()
			defer mu.Unlock()
			unconfirmed[m.ID]--
			m.Conn.Ack(m.Channel, m.Tag, false)
		})
	}}, single)
	r.publish(message("first"), message("twin"), message("twin"), message("other"), message("twin"))
	r.settle()
	r.wantFIFO()
}

func TestAfterATeardownALaneSendsOneMessageFirst(t *testing.T) {
	var mu sync.Mutex
	cut := false
	waiting, worst := 0, 0
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case cut && m.Tag == 1: // what arrives until this is confirmed?
			waiting = 1
			time.AfterFunc(30*time.Millisecond, func() {
				mu.Lock()
				defer mu.Unlock()
				waiting = 0
				m.Conn.Ack(m.Channel, 1, false)
			})
		case cut:
			if waiting > 0 {
				waiting++
				worst = max(worst, waiting)
			}
			m.Conn.Ack(m.Channel, m.Tag, false)
		case m.Tag == 1:
			m.Conn.Ack(m.Channel, m.Tag, false)
		case m.Tag == 20:
			cut = true
			m.Conn.Cut()
		}
	}}, single)
	r.publish(ids("m", 30)...)
	r.settle()
	r.wantFIFO()
	mu.Lock()
	defer mu.Unlock()
	if worst > 0 {
		t.Errorf("%d messages were in flight before the first confirm", worst)
	}
	if s := r.p.Stats(); s.Resent < 19 || s.ConnectionsLost != 1 {
		t.Errorf("want at least 19 messages sent again after one lost connection: %+v", s)
	}
}

func TestInvalidMessagesAreRefusedInOrderAndNeverSent(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		if m.ID != "good" {
			t.Errorf("message %.20q was sent", m.ID)
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single)
	r.publish(message("good"), message(""), message("good"), message(strings.Repeat("x", 256)), message("good"))
	r.wantKinds(confirmed, refused, confirmed, refused, confirmed)
	r.wantFIFO()
}

func TestHeadersAboveASmallNegotiatedFrameAreRefused(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{FrameMax: 8192}, single)
	large := message("large")
	large.Headers = map[string]any{"h": strings.Repeat("x", 9000)}
	r.publish(message("a"), large, message("b"))
	r.wantKinds(confirmed, refused, confirmed)
	if s := r.p.Stats(); s.ConnectionsLost != 0 {
		t.Errorf("stats %+v", s)
	}
}
