package rabbittest_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

func TestMain(m *testing.M) { os.Exit(rabbittest.Main(m)) }

const drainLimit = 20 * time.Second

var quorum = amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum}

// publish sends persistent messages with the bodies 0, 1, ... and waits for all
// confirms.
func publish(t *testing.T, url, exchange, key string, n int) {
	t.Helper()
	ch := rabbittest.Channel(t, url)
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), drainLimit)
	defer cancel()
	var confirms []*amqp.DeferredConfirmation
	for i := range n {
		c, err := ch.PublishWithDeferredConfirmWithContext(ctx, exchange, key, true, false,
			amqp.Publishing{DeliveryMode: amqp.Persistent, Body: fmt.Append(nil, i)})
		if err != nil {
			t.Fatal(err)
		}
		confirms = append(confirms, c)
	}
	for i, c := range confirms {
		if acked, err := c.WaitContext(ctx); err != nil || !acked {
			t.Fatalf("message %d: acked %v, error %v", i, acked, err)
		}
	}
}

// Both use one server, since each boot takes seconds.
func TestOwnServer(t *testing.T) {
	t.Parallel()
	s := rabbittest.Start(t, rabbittest.Setting("max_message_size", "65536"))
	t.Run("rabbitmqctl blocks and unblocks publishers", func(t *testing.T) { testCtl(t, s) })
	t.Run("durable messages stay whatever ends the server", func(t *testing.T) { testEnds(t, s) })
}

func testEnds(t *testing.T, s *rabbittest.Server) {
	url := s.URL()
	rabbittest.Queue(t, url, "classic", "", "", nil)
	rabbittest.Queue(t, url, "quorum", "events", "#", quorum)
	ends := []struct {
		name string
		end  func() error
	}{
		{"a clean stop", func() error { _, err := s.Stop(); return err }},
		{"a crash", s.Kill},
	}
	for _, e := range ends {
		publish(t, url, "", "classic", 1)
		publish(t, url, "events", "any", 1)
		if err := e.end(); err != nil {
			t.Fatalf("%s: %v", e.name, err)
		}
		if conn, err := amqp.Dial(url); err == nil {
			_ = conn.Close()
			t.Fatalf("%s: the server still answers", e.name)
		}
		if err := s.Start(); err != nil {
			t.Fatalf("after %s: %v", e.name, err)
		}
		rabbittest.Drain(t, url, "classic", 1, drainLimit)
		rabbittest.Drain(t, url, "quorum", 1, drainLimit)
	}
}

func testCtl(t *testing.T, s *rabbittest.Server) {
	conn, err := amqp.Dial(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	blocked := conn.NotifyBlocked(make(chan amqp.Blocking, 10))
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		watermark string
		active    bool
	}{{"0", true}, {"0.4", false}} {
		if _, err := s.Ctl("set_vm_memory_high_watermark", step.watermark); err != nil {
			t.Fatal(err)
		}
		// Only a connection that publishes is told.
		if err := ch.PublishWithContext(t.Context(), "", "nowhere", false, false, amqp.Publishing{}); err != nil {
			t.Fatal(err)
		}
		select {
		case b := <-blocked:
			if b.Active != step.active {
				t.Fatalf("watermark %s: blocked is %v", step.watermark, b.Active)
			}
		case <-time.After(drainLimit):
			t.Fatalf("watermark %s: not told within %s", step.watermark, drainLimit)
		}
	}
	if _, err := s.Ctl("no_such_command"); err == nil {
		t.Error("rabbitmqctl took a command that does not exist")
	}
}

func TestDrainReturnsMessagesInOrderAndTakesNoMore(t *testing.T) {
	t.Parallel()
	url := rabbittest.URL(t)
	for name, args := range map[string]amqp.Table{"classic": nil, "quorum": quorum} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			queue := rabbittest.Name(t)
			rabbittest.Queue(t, url, queue, queue+"_x", "a.*", args)
			const sent, taken = 1700, 1500
			publish(t, url, queue+"_x", "a.b", sent)
			for i, d := range rabbittest.Drain(t, url, queue, taken, drainLimit) {
				if string(d.Body) != fmt.Sprint(i) {
					t.Fatalf("message %d has body %s", i, d.Body)
				}
			}
			for i, d := range rabbittest.Drain(t, url, queue, sent-taken, drainLimit) {
				if string(d.Body) != fmt.Sprint(taken+i) || d.Redelivered {
					t.Fatalf("message %d has body %s, redelivered %v", taken+i, d.Body, d.Redelivered)
				}
			}
		})
	}
}

func TestQueueAndExchangeGoAwayWithTheTest(t *testing.T) {
	t.Parallel()
	url := rabbittest.URL(t)
	var name string
	t.Run("user", func(t *testing.T) {
		name = rabbittest.Name(t)
		rabbittest.Queue(t, url, name, name, "a", nil)
		rabbittest.Queue(t, url, name+"_2", name, "b", nil)
	})
	for kind, passive := range map[string]func(*amqp.Channel) error{
		"queue": func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
			return err
		},
		"exchange": func(ch *amqp.Channel) error {
			return ch.ExchangeDeclarePassive(name, amqp.ExchangeTopic, true, false, false, false, nil)
		},
	} {
		if err := passive(rabbittest.Channel(t, url)); err == nil {
			t.Errorf("the %s is left", kind)
		}
	}
}

func TestMissingServerNamesTheSetup(t *testing.T) {
	t.Setenv("CDCPUB_TEST_RABBIT_BIN", t.TempDir())
	_, err := rabbittest.New(t.Context())
	if err == nil || !strings.Contains(err.Error(), "scripts/setup") {
		t.Errorf("got %v", err)
	}
}
