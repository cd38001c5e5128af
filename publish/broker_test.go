package publish

import (
	"errors"
	"net/url"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

func openForTest(t *testing.T, url string) *Broker {
	t.Helper()
	b, err := OpenBroker(t.Context(), url, nil, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// The question for the right to write must not be a message.
func TestAskingForTheRightToWriteDeliversNothing(t *testing.T) {
	url, name := rabbittest.URL(t), rabbittest.Name(t)
	rabbittest.Queue(t, url, name, name, "#", nil)
	b := openForTest(t, url)
	if a, err := b.MayPublish(name, "key"); a != Yes || err != nil {
		t.Errorf("MayPublish = %s, %v; want yes", a, err)
	}
	if a, err := b.MayPublish(name+".missing", "key"); a != Missing || err != nil {
		t.Errorf("MayPublish to a missing exchange = %s, %v", a, err)
	}
	if a, err := b.ExchangeExists(name + ".missing"); a != Missing || err != nil {
		t.Errorf("ExchangeExists of a missing exchange = %s, %v", a, err)
	}
	// A message behind it on the same queue is the only one that arrives.
	ch := rabbittest.Channel(t, url)
	if err := ch.PublishWithContext(t.Context(), name, "key", true, false, amqp.Publishing{MessageId: "after"}); err != nil {
		t.Fatal(err)
	}
	if d := rabbittest.Drain(t, url, name, 1, limit)[0]; d.MessageId != "after" {
		t.Errorf("message %q was delivered", d.MessageId)
	}
	if q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil); err != nil || q.Messages != 0 {
		t.Errorf("%d messages are left, %v", q.Messages, err)
	}
}

func TestTheDefaultExchangeAndInternalOnes(t *testing.T) {
	url, name := rabbittest.URL(t), rabbittest.Name(t)
	ch := rabbittest.Channel(t, url)
	if err := ch.ExchangeDeclare(name, amqp.ExchangeTopic, true, false, true, false, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = rabbittest.Channel(t, url).ExchangeDelete(name, false, false) })
	b := openForTest(t, url)
	if a, err := b.ExchangeExists(""); a != Yes || err != nil {
		t.Errorf("the default exchange: %s, %v", a, err)
	}
	if a, err := b.MayPublish(name, "x"); a != Forbidden || err != nil {
		t.Errorf("an internal exchange: %s, %v; want forbidden", a, err)
	}
}

func TestEachWayOfNotGettingIntoABrokerHasItsName(t *testing.T) {
	s := rabbittest.Start(t)
	for _, args := range [][]string{{"add_user", "poor", "secret"}, {"add_vhost", "other"}} {
		if _, err := s.Ctl(args...); err != nil {
			t.Fatal(err)
		}
	}
	at := func(user *url.Userinfo, host, vhost string) string {
		u := url.URL{Scheme: "amqp", User: user, Host: host, Path: "/" + vhost}
		return u.String()
	}
	good, err := url.Parse(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		url  string
		want OpenFailure
	}{
		"a wrong password":       {at(url.UserPassword("poor", "hunter2"), s.Addr(), ""), FailedLogin},
		"a user that is not":     {at(url.UserPassword("nobody", "hunter2"), s.Addr(), ""), FailedLogin},
		"a vhost that is not":    {at(good.User, s.Addr(), "nowhere"), FailedNoVhost},
		"a vhost without rights": {at(url.UserPassword("poor", "secret"), s.Addr(), "other"), FailedAccess},
		"nobody listens":         {at(good.User, "127.0.0.1:1", ""), FailedReach},
		"no URL":                 {"amqp://%zz", FailedURL},
		"TLS where there is none": {
			(&url.URL{Scheme: "amqps", User: good.User, Host: s.Addr(), Path: "/"}).String(), FailedReach},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := OpenBroker(t.Context(), tc.url, nil, "test")
			if err == nil {
				b.Close()
			}
			var e *OpenError
			if !errors.As(err, &e) || e.Failure != tc.want {
				t.Errorf("error %v (%+v), want %s", err, e, tc.want)
			}
		})
	}
}

func TestTopologyIsMadeOnceAndLeftAlone(t *testing.T) {
	url, name := rabbittest.URL(t), rabbittest.Name(t)
	t.Cleanup(func() {
		ch := rabbittest.Channel(t, url)
		for _, q := range []string{name, name + ".classic"} {
			_, _ = ch.QueueDelete(q, false, false, false) // a queue that the test did not get to make
		}
		for _, e := range []string{name, name + ".hash", name + ".direct"} {
			_ = ch.ExchangeDelete(e, false, false)
		}
	})
	b := openForTest(t, url)
	for _, first := range []bool{true, false} {
		if made, err := b.DeclareExchange(name, TopicExchange); err != nil || bool(made) != first {
			t.Fatalf("DeclareExchange = %t, %v; want made: %t", made, err, first)
		}
		if made, err := b.DeclareExchange(name+".hash", HashExchange); err != nil || bool(made) != first {
			t.Fatalf("DeclareExchange of a hash exchange = %t, %v; want made: %t", made, err, first)
		}
		if made, err := b.DeclareQueue(Queue{Name: name, SingleActiveConsumer: true}); err != nil || bool(made) != first {
			t.Fatalf("DeclareQueue = %t, %v; want made: %t", made, err, first)
		}
		for _, err := range []error{b.BindExchange(name+".hash", name, "#"), b.BindQueue(name, name+".hash", "1")} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	// One way from the exchange over the other to the queue, and only one.
	ch := rabbittest.Channel(t, url)
	if err := ch.PublishWithContext(t.Context(), name, "any", true, false, amqp.Publishing{}); err != nil {
		t.Fatal(err)
	}
	rabbittest.Drain(t, url, name, 1, limit)
	if q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil); err != nil || q.Messages != 0 {
		t.Errorf("%d messages are left, %v", q.Messages, err)
	}
	// What others have made otherwise is used as it is.
	if _, err := ch.QueueDeclare(name+".classic", true, false, false, false, amqp.Table{"x-max-length": int32(5)}); err != nil {
		t.Fatal(err)
	}
	if made, err := b.DeclareQueue(Queue{Name: name + ".classic"}); made || err != nil {
		t.Errorf("DeclareQueue of another kind = %t, %v", made, err)
	}
	if err := ch.ExchangeDeclare(name+".direct", amqp.ExchangeDirect, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if is, err := b.ExchangeIs(name+".direct", TopicExchange); is || err != nil {
		t.Errorf("ExchangeIs of a direct exchange = %t, %v", is, err)
	}
	if is, err := b.ExchangeIs(name, TopicExchange); !is || err != nil {
		t.Errorf("ExchangeIs of a topic exchange = %t, %v", is, err)
	}
	if err := b.BindQueue("missing."+name, name, "#"); err == nil {
		t.Error("a queue that does not exist was bound")
	}
}
