package publish

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
)

func TestPublishDoesNotBlockAndCloseKeepsItsDeadlineWhenTheBrokerReadsNoMore(t *testing.T) {
	b := fakebroker.New(fakebroker.Script{Publish: func(m fakebroker.Message) {
		m.Conn.StopReading()
		m.Conn.Ack(m.Channel, m.Tag, false)
	}})
	t.Cleanup(b.Close)
	p, err := New(Config{URLs: []string{"amqp://broker.invalid/"}, dial: b.Dial})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, p: p}
	start := time.Now()
	messages := ids("m", 2048)
	for i := range messages {
		messages[i].OrderKey = messages[i].ID
		messages[i].Body = make([]byte, 4096)
	}
	r.publish(messages...)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("publishing took %s", took)
	}
	// Of the two lanes of a connection one may still be opening its channel.
	until(t, "a window is full on each connection", func() bool { return p.Stats().InFlight >= 1024 })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start = time.Now()
	mustWrap(t, p.Close(ctx), context.DeadlineExceeded)
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("close took %s with a deadline of 100ms", took)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestCloseEndsOutcomesAndPublishThenDoesNothing(t *testing.T) {
	r, _ := withBroker(t, fakebroker.Script{}, single)
	r.publish(ids("m", 3)...)
	r.settle()
	if err := r.p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.p.Publish(99, message("late"))
	if batch, open := <-r.p.Outcomes(); open {
		t.Errorf("outcomes after close: %v", batch)
	}
}

func TestCloseWhileNoBrokerIsThere(t *testing.T) {
	b := fakebroker.New(fakebroker.Script{})
	b.Close()
	r := newRig(t, Config{URLs: []string{"amqp://a.invalid", "amqp://b.invalid"}, dial: b.Dial})
	r.publish(ids("m", 3)...)
	until(t, "an attempt has failed", func() bool { return r.p.Stats().LastError != "" })
	s := r.p.Stats()
	if s.Connected != 0 || s.Unsettled != 3 || s.OldestUnsettled <= 0 || s.LastErrorAt.IsZero() {
		t.Errorf("stats %+v", s)
	}
	if err := r.p.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestABrokerThatComesLateGetsEverything(t *testing.T) {
	var seen recorder
	var attempts atomic.Int32
	r, _ := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		seen.saw(m.ID)
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single, func(c *Config) {
		dial := c.dial
		c.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if attempts.Add(1) < 6 {
				return nil, errors.New("scripted: not yet")
			}
			return dial(ctx, network, addr)
		}
	})
	messages := ids("m", 50)
	r.publish(messages...)
	r.settle()
	seen.wantFirst(t, messages)
}

func TestABlockedConnectionPausesTheLane(t *testing.T) {
	var seen recorder
	r, b := withBroker(t, fakebroker.Script{Publish: func(m fakebroker.Message) {
		seen.saw(m.ID)
		m.Conn.Ack(m.Channel, m.Tag, false)
	}}, single)
	r.publish(message("a"))
	r.settle()
	// The broker sees a connection a moment before we listen for its blocking.
	until(t, "both connections are up", func() bool { return r.p.Stats().Connected == 2 })
	for _, c := range b.Conns() {
		c.Block("low on memory")
	}
	until(t, "both connections know", func() bool { return r.p.Stats().Blocked == 2 })
	r.publish(ids("m", 20)...)
	until(t, "the sender has reached the first", func() bool { return r.p.Stats().InFlight > 0 })
	seen.mu.Lock()
	if len(seen.first) != 1 {
		t.Errorf("sent while blocked: %v", seen.first[1:])
	}
	seen.mu.Unlock()
	for _, c := range b.Conns() {
		c.Unblock()
	}
	r.settle()
	until(t, "the control connection knows, too", func() bool { return r.p.Stats().Blocked == 0 })
	if s := r.p.Stats(); s.Confirmed != 21 {
		t.Errorf("stats %+v", s)
	}
}

func TestBrokerURLsAreCheckedWithoutRepeatingThem(t *testing.T) {
	for _, c := range []struct{ name, url string }{
		{"an unescaped slash in the password", "amqp://user:hunter2/x@host:5672/"},
		{"an unescaped per cent sign in the password", "amqp://user:hunter2%@host/"},
		{"another scheme", "http://user:hunter2@host/"},
		{"a space", "amqp://user:hunter2@host/ "},
		{"a port that is no number", "amqp://user:hunter2@host:port/"},
		{"a certificate, which belongs in TLS", "amqps://user:hunter2@host/?cacertfile=ca.pem"},
		{"no heartbeat", "amqp://user:hunter2@host/?heartbeat=0"},
		{"an unknown mechanism", "amqp://user:hunter2@host/?auth_mechanism=hunter2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := New(Config{URLs: []string{c.url}})
			if err == nil {
				t.Fatal("accepted")
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("error repeats the password: %v", err)
			}
		})
	}
}

func TestAnAmqpsTargetVerifiesTheServerByDefault(t *testing.T) {
	for _, c := range []struct {
		name, url string
		base      *tls.Config
		server    string
		insecure  bool
	}{
		{"no TLS configuration", "amqps://rabbit.example", nil, "rabbit.example", false},
		{"a name in the URL", "amqps://10.0.0.1?server_name_indication=rabbit", nil, "rabbit", false},
		{"a configuration is used as given", "amqps://10.0.0.1", &tls.Config{InsecureSkipVerify: true, ServerName: "x"}, "x", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseTarget(c.url, c.base)
			if err != nil {
				t.Fatal(err)
			}
			if got.tls.ServerName != c.server || got.tls.InsecureSkipVerify != c.insecure {
				t.Errorf("server name %q, insecure %v", got.tls.ServerName, got.tls.InsecureSkipVerify)
			}
		})
	}
	plain, err := parseTarget("amqp://user:hunter2@host/vhost?heartbeat=3", &tls.Config{})
	if err != nil || plain.tls != nil || plain.heartbeat != 3*time.Second || plain.String() != "amqp://host:5672" {
		t.Errorf("target %v, %v", plain, err)
	}
}

func TestConfigurationErrors(t *testing.T) {
	url := []string{"amqp://host"}
	for _, c := range []struct {
		name string
		cfg  Config
	}{
		{"no URL", Config{}},
		{"negative lanes", Config{URLs: url, Lanes: -1}},
		{"more connections than lanes", Config{URLs: url, Lanes: 2, Connections: 3}},
		{"negative channel limit", Config{URLs: url, PerChannel: -1}},
		{"negative window", Config{URLs: url, Window: -1}},
		{"negative timeout", Config{URLs: url, ConfirmTimeout: -1}},
		{"negative size", Config{URLs: url, MaxMessageBytes: -1}},
		{"long name", Config{URLs: url, Name: strings.Repeat("n", 256)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if p, err := New(c.cfg); err == nil {
				p.stop()
				t.Error("accepted")
			}
		})
	}
}
