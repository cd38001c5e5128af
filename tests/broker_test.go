package tests

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
)

// brokerAdmin is a broker of its own with whoever administers it: rabbitmqctl is
// found by name, and the URL has all rights.
type brokerAdmin struct {
	rabbit *rabbittest.Server
	bin    string // holds rabbitmqctl
}

func startAdmin(t *testing.T, opts ...rabbittest.Option) brokerAdmin {
	t.Helper()
	a := brokerAdmin{rabbit: rabbittest.Start(t, opts...), bin: t.TempDir()}
	if err := a.rabbit.CtlScript(filepath.Join(a.bin, "rabbitmqctl")); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a brokerAdmin) ctl(t *testing.T, args ...string) {
	t.Helper()
	if _, err := a.rabbit.Ctl(args...); err != nil {
		t.Fatal(err)
	}
}

// url is the broker's URL for another user and virtual host.
func (a brokerAdmin) url(t *testing.T, user, password, vhost string) string {
	t.Helper()
	u, err := url.Parse(a.rabbit.URL())
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(user, password)
	if vhost != "/" {
		u.Path, u.RawPath = "/"+vhost, "/"+url.PathEscape(vhost)
	}
	return u.String()
}

// brokerFault is something wrong with RabbitMQ.
type brokerFault struct {
	plant func(t *testing.T, a brokerAdmin, c *connector, user string)
	check string // the line of check that has to name it; %s is the connector's name
	says  string
	flags string // further flags of check
	admin bool   // its command is for a user who may configure
	stdin string // what its command asks for
	first func(f finding, user string) []string
}

func brokerFaults() map[string]brokerFault {
	return map[string]brokerFault{
		"the password is wrong": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, user string) {
				t.Helper()
				a.ctl(t, "change_password", user, "another")
			}, check: "broker", says: "username or password not allowed", stdin: "secret\n"},
		"there is no such user": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, user string) {
				t.Helper()
				a.ctl(t, "delete_user", user)
			}, check: "broker", says: "username or password not allowed", stdin: "secret\n",
			// RabbitMQ does not say whether the user or the password is wrong, so this
			// command stands in the note.
			first: func(f finding, _ string) []string {
				_, command, _ := strings.Cut(f.Note, "if there is no such user: ")
				return []string{command}
			}},
		"there is no such virtual host": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, user string) {
				t.Helper()
				c.env["CDCPUB_PUBLISH_URL"] = a.url(t, user, "secret", "team/"+user)
			}, check: "broker", says: "not found", admin: true},
		"the user has no rights in the virtual host": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, user string) {
				t.Helper()
				a.ctl(t, "clear_permissions", "-p", "/", user)
			}, check: "broker", says: "refused"},
		"the user may not write to the exchange": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, user string) {
				t.Helper()
				a.ctl(t, "set_permissions", "-p", "/", user, "^$", "^other$", "^$")
			}, check: "exchange %s.order", says: "may not write"},
		"the exchange is missing": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, _ string) {
				t.Helper()
				onChannel(t, a.rabbit.URL(), func(ch *amqp.Channel) error {
					return ch.ExchangeDelete(c.env["CDCPUB_SOURCE_SLOT"]+".order", false, false)
				})
			}, check: "exchange %s.order", says: "does not exist", admin: true},
		"no queue is bound to the exchange": {
			plant: func(t *testing.T, a brokerAdmin, c *connector, _ string) {
				t.Helper()
				onChannel(t, a.rabbit.URL(), func(ch *amqp.Channel) error {
					_, err := ch.QueueDelete("cdcpub.events", false, false, false)
					return err
				})
			}, check: "exchange %s.order", says: "no queue is bound", flags: "--management", admin: true},
	}
}

func onChannel(t *testing.T, amqpURL string, do func(*amqp.Channel) error) {
	t.Helper()
	if err := do(rabbittest.Channel(t, amqpURL)); err != nil {
		t.Fatal(err)
	}
}

// What holds for the source holds for the broker: what check prints, run as it
// stands by whom it names, mends it. A message then arrives.
func TestCheckNamesEachFaultOfTheBrokerAndItsCommandMendsIt(t *testing.T) {
	t.Parallel()
	a := startAdmin(t, rabbittest.Management())
	for name, fault := range brokerFaults() {
		t.Run(name, func(t *testing.T) {
			dsn, slot := pgtest.Database(t), rabbittest.Name(t)
			user := "user of " + slot // a name that a shell takes apart
			a.ctl(t, "add_user", user, "secret")
			a.ctl(t, "set_permissions", "-p", "/", user, "^$", `^`+slot+`\..*$`, "^$")
			a.ctl(t, "set_user_tags", user, "monitoring")
			c := newConnector(t, dsn, a.rabbit.URL(), slot)
			c.env["PATH"] = a.bin + ":" + c.env["PATH"]
			c.must("init", "--create-table")
			pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), 'order', '42', 'Made', '{}', 1)")
			c.must("init", "--broker")
			c.env["CDCPUB_PUBLISH_URL"] = a.url(t, user, "secret", "/")
			if failed := c.checkBroker(a, fault.flags); len(failed) > 0 {
				t.Fatalf("before the fault: %+v", failed)
			}
			fault.plant(t, a, c, user)
			c.mendBroker(t, a, fault, user)
			c.start()
			eventually(t, 30*time.Second, "the event is confirmed", func() bool {
				s := c.status()
				return s.Ready && s.Counters.Confirmed >= 1
			})
			c.stop()
			c.must("teardown", "--yes")
		})
	}
}

// checkBroker runs check and returns what failed.
func (c *connector) checkBroker(a brokerAdmin, flags string) []finding {
	c.t.Helper()
	args := "--output json"
	if flags != "" {
		args += " " + flags + " " + a.rabbit.ManagementURL()
	}
	failed, _ := c.findings("cdcpub check " + args)
	return failed
}

// mendBroker finds the planted fault, runs what check says until nothing fails,
// and fails the test if that takes more than the virtual host, its rights and its
// exchange.
func (c *connector) mendBroker(t *testing.T, a brokerAdmin, fault brokerFault, user string) {
	t.Helper()
	name := fault.check
	if strings.Contains(name, "%s") {
		name = fmt.Sprintf(name, c.env["CDCPUB_SOURCE_SLOT"])
	}
	for round := range 3 {
		failed := c.checkBroker(a, fault.flags)
		if len(failed) == 0 && round > 0 {
			return
		}
		if len(failed) != 1 {
			t.Fatalf("round %d: %d checks failed, want one: %+v", round, len(failed), failed)
		}
		f := failed[0]
		t.Logf("%s: %s\n%s (%s) %s", f.Check, f.Text, strings.Join(f.Fix, "\n"), f.As, f.Note)
		if round == 0 && (f.Check != name || !strings.Contains(f.Text, fault.says)) {
			t.Fatalf("check %s says %q, want %s with %q", f.Check, f.Text, name, fault.says)
		}
		fix := f.Fix
		if fault.first != nil && round == 0 {
			fix = fault.first(f, user)
		}
		if len(fix) == 0 {
			t.Fatalf("no command mends %s", f.Check)
		}
		own := c.env["CDCPUB_PUBLISH_URL"]
		if fault.admin && strings.HasPrefix(fix[0], "cdcpub init --broker") {
			c.env["CDCPUB_PUBLISH_URL"] = adminOf(t, a, own)
		}
		_, stderr, code := c.shellWith(strings.Join(fix, "\n"), strings.NewReader(fault.stdin))
		c.env["CDCPUB_PUBLISH_URL"] = own
		if code != 0 {
			t.Fatalf("%q: exit %d: %s", fix, code, stderr)
		}
	}
	if failed := c.checkBroker(a, fault.flags); len(failed) > 0 {
		t.Errorf("still: %+v", failed)
	}
}

// adminOf is a URL with all rights in the virtual host of another URL.
func adminOf(t *testing.T, a brokerAdmin, own string) string {
	t.Helper()
	admin, err := url.Parse(a.rabbit.URL())
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(own)
	if err != nil {
		t.Fatal(err)
	}
	if vhost := strings.TrimPrefix(u.Path, "/"); vhost != "" {
		a.ctl(t, "set_permissions", "-p", vhost, admin.User.Username(), ".*", ".*", ".*")
	}
	u.User = admin.User
	return u.String()
}

// A broker that is short of memory answers no question about rights. check says that
// rather than that it got no answer.
func TestCheckNamesTheBrokersAlarm(t *testing.T) {
	t.Parallel()
	a := startAdmin(t)
	dsn, name := pgtest.Database(t), rabbittest.Name(t)
	c := newConnector(t, dsn, a.rabbit.URL(), name)
	c.must("init", "--create-table")
	for _, typ := range []string{"order", "payment"} {
		pgtest.Exec(t, dsn, "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version) VALUES (gen_random_uuid(), '"+typ+"', '42', 'Made', '{}', 1)")
	}
	c.must("init", "--broker")
	a.ctl(t, "set_vm_memory_high_watermark", "absolute", "1MB")
	failed, output := c.check()
	if len(failed) != 1 || failed[0].Check != "alarms" || !strings.Contains(failed[0].Text, "low on memory") {
		t.Errorf("want the alarm alone:\n%s", output)
	}
	a.ctl(t, "set_vm_memory_high_watermark", "absolute", "512MB")
	eventually(t, time.Minute, "the alarm is over", func() bool { failed, _ := c.check(); return len(failed) == 0 })
}

// Run twice, init --broker leaves what is there, and says so; what differs from
// what it would make is left alone.
func TestInitBrokerChangesNothingThatIsThere(t *testing.T) {
	t.Parallel()
	dsn, amqpURL, name := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, dsn, amqpURL, name)
	c.must("init", "--create-table")
	queue := name + ".look"
	if _, stderr, code := c.cli("init", "--broker", "--queue", queue); code != 2 || !strings.Contains(stderr, "cdcpub init --broker --exchange outbox.event.order") {
		t.Errorf("no rows and no --exchange: exit %d: %s", code, stderr)
	}
	rabbittest.Queue(t, amqpURL, queue, "", "", nil) // the test's to remove; a classic one that is no quorum queue
	args := []string{"init", "--broker", "--queue", queue, "--exchange", name + ".order"}
	for _, word := range []string{"created", "exists"} {
		stdout, stderr, code := c.cli(args...)
		if code != 0 || !strings.Contains(stdout, "exchange "+name+".order: "+word+"\n") || !strings.Contains(stdout, "queue "+queue+": exists\n") {
			t.Errorf("exit %d, want the exchange %q:\n%s%s", code, word, stdout, stderr)
		}
	}
	fanout := name + ".fan"
	onChannel(t, amqpURL, func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(fanout, "fanout", true, false, false, false, nil)
	})
	t.Cleanup(func() {
		onChannel(t, amqpURL, func(ch *amqp.Channel) error {
			return errors.Join(ch.ExchangeDelete(fanout, false, false), ch.ExchangeDelete(name+".order", false, false))
		})
	})
	stdout, stderr, code := c.cli("init", "--broker", "--queue", queue, "--exchange", fanout)
	if code != 0 || !strings.Contains(stdout, "left alone") || strings.Contains(stdout, "binding "+fanout) {
		t.Errorf("exit %d, want the fanout exchange left alone:\n%s%s", code, stdout, stderr)
	}
}

// Who may not configure is told which right is missing and how somebody else runs
// the same command.
func TestInitBrokerWithoutRightsSaysWhoHasToRunIt(t *testing.T) {
	t.Parallel()
	a := startAdmin(t)
	a.ctl(t, "add_user", "cdcpub", "secret")
	a.ctl(t, "set_permissions", "-p", "/", "cdcpub", "^$", ".*", "^$")
	c := newConnector(t, pgtest.Database(t), a.url(t, "cdcpub", "secret", "/"), rabbittest.Name(t))
	_, stderr, code := c.cli("init", "--broker", "--exchange", "outbox.event.order", "--queue", "my orders", "--shards", "2")
	want := "CDCPUB_PUBLISH_URL='amqp://ADMIN:PASSWORD@" + a.rabbit.Addr() + "/' cdcpub init --broker --exchange outbox.event.order --queue 'my orders' --shards 2\n"
	if code != 1 || !strings.Contains(stderr, want) || strings.Contains(stderr, "secret") {
		t.Errorf("exit %d, want it to say %q:\n%s", code, want, stderr)
	}
}

// The sharded recipe: whichever way the queues are bound, all events of an
// aggregate are in one queue, in order, each queue has one consumer at a time, and
// no event is missing.
func TestShardsKeepEachAggregateInOneQueueAndInOrder(t *testing.T) {
	t.Parallel()
	const shards, aggregates, events = 4, 40, 5
	for name, key := range map[string]string{
		"by a consistent-hash exchange":         "",
		"by the number that is the routing key": "{partition:4}",
		"by the number within the routing key":  "shard.{partition:4}.orders",
	} {
		t.Run(name, func(t *testing.T) {
			dsn, amqpURL, slot := pgtest.Database(t), rabbittest.URL(t), rabbittest.Name(t)
			c := newConnector(t, dsn, amqpURL, slot)
			if key != "" {
				c.env["CDCPUB_ROUTER_ROUTING_KEY"] = key
			}
			c.must("init", "--create-table")
			t.Cleanup(func() { removeShards(t, amqpURL, slot, shards) })
			c.must("init", "--broker", "--exchange", slot+".order", "--queue", slot, "--shards", fmt.Sprint(shards))
			for n := range events {
				pgtest.Exec(t, dsn, fmt.Sprintf(`INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, version)
					SELECT gen_random_uuid(), 'order', 'a' || g, 'Made', '{}', %d FROM generate_series(1, %d) g`, n+1, aggregates))
			}
			c.start()
			eventually(t, 60*time.Second, "all events are confirmed", func() bool { return c.status().Counters.Confirmed == aggregates*events })
			c.stop()
			c.must("teardown", "--yes")
			queueOf, used, total := map[string]int{}, 0, 0
			for i := range shards {
				seen := map[string][]string{}
				got := drain(t, amqpURL, fmt.Sprintf("%s.%d", slot, i))
				for _, d := range got {
					id := fmt.Sprint(d.Headers["aggregate_id"])
					if at, ok := queueOf[id]; ok && at != i {
						t.Errorf("aggregate %s is in the queues %d and %d", id, at, i)
					}
					queueOf[id] = i
					seen[id] = append(seen[id], fmt.Sprint(d.Headers["aggregate_version"]))
				}
				for id, versions := range seen {
					if len(versions) != events || !slices.IsSorted(versions) {
						t.Errorf("aggregate %s arrived as versions %v", id, versions)
					}
				}
				total += len(got)
				if len(got) > 0 {
					used++
				}
			}
			if total != aggregates*events || used < 2 {
				t.Errorf("%d events in %d queues, want %d in more than one", total, used, aggregates*events)
			}
		})
	}
}

func removeShards(t *testing.T, amqpURL, slot string, shards int) {
	t.Helper()
	onChannel(t, amqpURL, func(ch *amqp.Channel) error {
		for i := range shards {
			if _, err := ch.QueueDelete(fmt.Sprintf("%s.%d", slot, i), false, false, false); err != nil {
				return err
			}
		}
		return errors.Join(ch.ExchangeDelete(slot+".shards", false, false), ch.ExchangeDelete(slot+".order", false, false))
	})
}

// A queue of the recipe serves one consumer at a time: the second gets nothing
// until the first has gone.
func TestShardQueuesHaveASingleActiveConsumer(t *testing.T) {
	t.Parallel()
	amqpURL, slot := rabbittest.URL(t), rabbittest.Name(t)
	c := newConnector(t, pgtest.Database(t), amqpURL, slot)
	t.Cleanup(func() { removeShards(t, amqpURL, slot, 1) })
	c.must("init", "--broker", "--exchange", slot+".order", "--queue", slot, "--shards", "1")
	onChannel(t, amqpURL, func(ch *amqp.Channel) error {
		first, err := ch.Consume(slot+".0", "first", true, false, false, false, nil)
		if err != nil {
			return err
		}
		second, err := ch.Consume(slot+".0", "second", true, false, false, false, nil)
		if err != nil {
			return err
		}
		next := func(ds <-chan amqp.Delivery, other <-chan amqp.Delivery, body string) error {
			if err := ch.Publish(slot+".order", "42", true, false, amqp.Publishing{Body: []byte(body)}); err != nil {
				return err
			}
			select {
			case <-ds:
				return nil
			case <-other:
				return fmt.Errorf("%s went to the wrong consumer", body)
			case <-time.After(30 * time.Second):
				return fmt.Errorf("%s did not arrive", body)
			}
		}
		for range 10 {
			if err := next(first, second, "while both are there"); err != nil {
				return err
			}
		}
		if err := ch.Cancel("first", false); err != nil {
			return err
		}
		return next(second, nil, "after the first has gone")
	})
	if _, err := os.Stat(c.env["CDCPUB_OFFSETS_PATH"]); err == nil {
		t.Error("init --broker made a state directory")
	}
}
