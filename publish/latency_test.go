package publish

import (
	"slices"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
	"github.com/cdcpub/cdcpub/router"
)

func sum(counts []uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

func TestLatencyBuckets(t *testing.T) {
	for _, c := range []struct {
		name   string
		took   time.Duration
		bucket int
	}{
		{"no time at all is in the first", 0, 0},
		{"a bound belongs to what is below it", time.Millisecond, 0},
		{"a nanosecond more does not", time.Millisecond + 1, 1},
		{"the last bound is in the last but one", time.Minute, latencyBuckets - 1},
		{"what is above all bounds is in the last", time.Minute + 1, latencyBuckets},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l latency
			now := time.Now()
			sent := &entry{sentAt: now.Add(-c.took)}
			l.settled([]*entry{sent, sent}, []router.Outcome{{Kind: confirmed}, {Kind: nacked}}, now)
			s := l.snapshot()
			if s.Counts[c.bucket] != 1 || sum(s.Counts) != 1 {
				t.Errorf("counts are %v, want one in bucket %d", s.Counts, c.bucket)
			}
			if want := c.took.Truncate(time.Microsecond).Seconds(); s.Sum != want {
				t.Errorf("sum is %v, want %v", s.Sum, want)
			}
			if len(s.Counts) != len(s.Bounds)+1 || !slices.IsSorted(s.Bounds) || s.Bounds[0] != 0.001 || s.Bounds[latencyBuckets-1] != 60 {
				t.Errorf("%d counts for bounds %v", len(s.Counts), s.Bounds)
			}
		})
	}
}

func TestLatencyIsOfConfirmedMessagesFromTheirSending(t *testing.T) {
	const held = 30 * time.Millisecond
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		time.AfterFunc(held, func() {
			switch m.ID {
			case "m1":
				m.Conn.Nack(m.Channel, m.Tag, false)
			case "m2":
				m.Conn.Return(m)
				m.Conn.Ack(m.Channel, m.Tag, false)
			default:
				m.Conn.Ack(m.Channel, m.Tag, false)
			}
		})
	}}, single)
	r.publish(ids("m", 8)...)
	r.publish(message("")) // never sent
	r.settle()
	s := r.p.Stats()
	if n := sum(s.ConfirmLatency.Counts); n != 6 || s.Confirmed != n {
		t.Errorf("%d times for %d confirmed messages, want 6", n, s.Confirmed)
	}
	for i, bound := range s.ConfirmLatency.Bounds {
		if n := s.ConfirmLatency.Counts[i]; n > 0 && bound < held.Seconds() {
			t.Errorf("%d messages took at most %v s, though each confirm was held back for %s", n, bound, held)
		}
	}
	if least := 6 * held.Seconds(); s.ConfirmLatency.Sum < least {
		t.Errorf("sum is %v s, want at least %v", s.ConfirmLatency.Sum, least)
	}
}

func TestAMessageThatIsGivenUpIsNotCountedAsSentAgain(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		m.Conn.CloseChannel(m.Channel, 406, "scripted")
	}}, single)
	r.publish(message("bad"))
	r.wantKinds(refused)
	if s := r.p.Stats(); s.Resent != 1 || sum(s.ConfirmLatency.Counts) != 0 {
		t.Errorf("want one message sent again, and no confirm: %+v", s)
	}
}
