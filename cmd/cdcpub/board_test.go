package main

import (
	"context"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/publish"
	"github.com/cdcpub/cdcpub/relay"
	"github.com/cdcpub/cdcpub/router"
	"github.com/cdcpub/cdcpub/wal"
)

// brokerURL serves b, which has only pipes, over TCP until the test ends.
func brokerURL(t *testing.T, b *fakebroker.Broker) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var copies sync.WaitGroup
	copies.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := b.Dial(context.Background(), "", "")
			if err != nil {
				client.Close()
				continue
			}
			join := func(to, from net.Conn) {
				_, _ = io.Copy(to, from) // ends with either connection
				to.Close()
				from.Close()
			}
			copies.Go(func() { join(server, client) })
			copies.Go(func() { join(client, server) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		b.Close()
		copies.Wait()
	})
	return "amqp://guest:guest@" + listener.Addr().String() + "/"
}

// confirmAll publishes the messages and waits for their confirms.
func confirmAll(t *testing.T, pub *publish.Publisher, ids ...string) {
	t.Helper()
	for i, id := range ids {
		pub.Publish(uint64(i), router.Message{RoutingKey: "key", ID: id})
	}
	deadline := time.After(20 * time.Second)
	for done := 0; done < len(ids); {
		select {
		case batch := <-pub.Outcomes():
			for _, o := range batch {
				if o.Kind != router.Confirmed {
					t.Fatalf("message %s is %s: %v", ids[o.Seq], o.Kind, o.Err)
				}
			}
			done += len(batch)
		case <-deadline:
			t.Fatalf("%d of %d messages confirmed; stats %+v", done, len(ids), pub.Stats())
		}
	}
}

// totals are the figures of a status that must not go down.
type totals struct {
	Confirms, Resent, Reconnects uint64
	Seconds                      float64
}

func totalsOf(s monitor.Status) totals {
	sum := totals{Resent: s.Counters.Resent, Reconnects: s.Publisher.Reconnects}
	if h := s.ConfirmSeconds; h != nil {
		sum.Seconds = h.Sum
		for _, n := range h.Counts {
			sum.Confirms += n
		}
	}
	return sum
}

func TestPublisherFiguresAddUpOverAttempts(t *testing.T) {
	var mu sync.Mutex
	cut := make(map[string]bool)
	url := brokerURL(t, fakebroker.New(fakebroker.Script{Publish: func(m fakebroker.Message) {
		mu.Lock()
		defer mu.Unlock()
		if m.ID != "plain" && !cut[m.ID] {
			cut[m.ID] = true
			m.Conn.Cut()
			return
		}
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}))
	b := newBoard(requiredConfig())
	if s := b.status(); s.ConfirmSeconds != nil {
		t.Errorf("confirm times %+v before there was a publisher", s.ConfirmSeconds)
	}
	var before totals
	for i, id := range []string{"first", "second"} {
		pub, err := publish.New(publish.Config{URLs: []string{url}, Lanes: 1})
		if err != nil {
			t.Fatal(err)
		}
		r, err := relay.New(b.cfg.relayConfig(hclog.NewNullLogger()), nil, pub, nil)
		if err != nil {
			t.Fatal(err)
		}
		b.attach(r, pub, &source{stream: &wal.Stream{}})
		if got := totalsOf(b.status()); got != before {
			t.Errorf("at the begin of attempt %d: %+v, want those of its end before: %+v", i+1, got, before)
		}
		confirmAll(t, pub, id, "plain")
		got := totalsOf(b.status())
		attempts := uint64(i + 1)
		if want := (totals{2 * attempts, attempts, attempts, got.Seconds}); got != want || got.Seconds <= before.Seconds {
			t.Errorf("after attempt %d: %+v, want %+v and more seconds than %v", i+1, got, want, before.Seconds)
		}
		b.detach()
		if after := totalsOf(b.status()); after != got {
			t.Errorf("between attempts: %+v, want %+v", after, got)
		}
		before = got
		if err := pub.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestStagesComeInTheOrderOfAnEvent(t *testing.T) {
	at := func(lsn offsets.LSN) offsets.Position { return offsets.Position{LSN: lsn} }
	inside := offsets.Position{LSN: 0x300, Tx: 0x380, Done: 7}
	for _, c := range []struct {
		name string
		r    relay.Stats
		want []string
	}{
		{"nothing known", relay.Stats{}, []string{"", "", "", "", ""}},
		{"events on their way", relay.Stats{Read: at(0x400), Sent: inside, Confirmed: at(0x200), Saved: at(0x100)},
			[]string{"0/400", "0/300 + 7 of 0/380", "0/200", "0/100", "0/100"}},
		{"everything confirmed, and log without events behind it", relay.Stats{Read: at(0x500), Sent: inside, Confirmed: at(0x500), Saved: at(0x400)},
			[]string{"0/500", "0/500", "0/500", "0/400", "0/400"}},
		{"inside a transaction", relay.Stats{Read: inside, Sent: inside, Confirmed: inside, Saved: inside},
			[]string{"0/300 + 7 of 0/380", "0/300 + 7 of 0/380", "0/300 + 7 of 0/380", "0/300 + 7 of 0/380", "0/300"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var names, positions []string
			for _, st := range stages(c.r) {
				names, positions = append(names, st.Name), append(positions, st.Position.Text)
			}
			if want := []string{"read", "published", "confirmed", "saved", "acked"}; !slices.Equal(names, want) {
				t.Errorf("stages %q, want %q", names, want)
			}
			if d := cmp.Diff(c.want, positions); d != "" {
				t.Errorf("positions (-want +got):\n%s", d)
			}
		})
	}
}

func TestBoardSaysThatItStops(t *testing.T) {
	b := newBoard(NewConfig())
	b.enter(monitor.StateStarting)
	b.stop()
	if s := b.status(); s.State != monitor.StateStopping || s.Ready || s.Reason == "" {
		t.Errorf("status after the request to stop: %+v", s)
	}
}
