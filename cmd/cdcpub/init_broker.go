package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/cdcpub/cdcpub/publish"
)

const defaultQueue = "cdcpub.events"

// brokerOptions are the flags of init --broker.
type brokerOptions struct {
	exchanges []string // empty: those that the rows in the outbox go to
	queue     string
	shards    int // 0: one queue for all
}

// initBroker makes exchanges, queues and bindings, and says of each thing whether
// it was there before. It changes nothing that exists.
func (a *app) initBroker(ctx context.Context, cfg Config, opts brokerOptions) error {
	exchanges, err := a.brokerExchanges(ctx, cfg, opts)
	if err != nil {
		return err
	}
	urls, err := cfg.brokerURLs()
	if err != nil {
		return err
	}
	b, err := openAny(ctx, urls)
	if err != nil {
		return err
	}
	defer b.Close()
	t := &topology{app: a, broker: b}
	err = t.build(cfg, exchanges, opts)
	var forbidden *publish.ForbiddenError
	if errors.As(err, &forbidden) {
		return fmt.Errorf("%w; run it as an administrator: %s", err, adminInit(cfg, b, opts))
	}
	return err
}

// brokerExchanges are the exchanges that events go to, as far as they are known
// before the first event.
func (a *app) brokerExchanges(ctx context.Context, cfg Config, opts brokerOptions) ([]string, error) {
	if len(opts.exchanges) > 0 {
		return opts.exchanges, nil
	}
	if !strings.ContainsAny(cfg.Router.Exchange, "{}") {
		return []string{cfg.Router.Exchange}, nil
	}
	destinations, whole, err := findDestinations(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if !whole {
		fmt.Fprintln(a.out, "Not every row was looked at, so there may be more exchanges than these; name others with --exchange.")
	}
	var names []string
	for _, d := range destinations {
		if d.Exchange != "" { // the default exchange is always there, and takes no bindings
			names = append(names, d.Exchange)
		}
	}
	if len(names) == 0 {
		return nil, usageError{errors.New("no row in the outbox tells yet which exchanges events go to; name them: cdcpub init --broker --exchange outbox.event.order")}
	}
	return names, nil
}

func openAny(ctx context.Context, urls []string) (*publish.Broker, error) {
	var errs []error
	for _, url := range urls {
		asking, cancel := context.WithTimeout(ctx, askTimeout)
		b, err := publish.OpenBroker(asking, url, nil, "cdcpub init")
		cancel()
		if err == nil {
			return b, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// topology makes things one after the other and reports each.
type topology struct {
	app    *app
	broker *publish.Broker
}

func (t *topology) say(format string, args ...any) { fmt.Fprintf(t.app.out, format+"\n", args...) }

func (t *topology) build(cfg Config, exchanges []string, opts brokerOptions) error {
	plan, err := planShards(cfg.Router.RoutingKey, opts)
	if err != nil {
		return err
	}
	var sources []string
	for _, name := range exchanges {
		ok, err := t.exchange(name, publish.TopicExchange)
		if err != nil {
			return err
		}
		if ok {
			sources = append(sources, name)
		}
	}
	if plan.hash != "" {
		if ok, err := t.exchange(plan.hash, publish.HashExchange); err != nil || !ok {
			if err != nil {
				return err
			}
			return usageError{fmt.Errorf("exchange %s exists and is not a consistent-hash exchange: choose another --queue", plan.hash)}
		}
		for _, from := range sources {
			if err := t.broker.BindExchange(plan.hash, from, "#"); err != nil {
				return err
			}
			t.say("binding %s -> %s (#): there", from, plan.hash)
		}
		sources = []string{plan.hash}
	}
	for _, q := range plan.queues {
		made, err := t.broker.DeclareQueue(publish.Queue{Name: q.name, SingleActiveConsumer: opts.shards > 0})
		if err != nil {
			return err
		}
		t.say("queue %s: %s", q.name, createdOr(made))
		for _, from := range sources {
			if err := t.broker.BindQueue(q.name, from, q.key); err != nil {
				return err
			}
			t.say("binding %s -> %s (%s): there", from, q.name, q.key)
		}
	}
	t.say("Nobody reads these queues until you do, and they keep everything. To remove one: rabbitmqctl delete_queue -p %s %s",
		shellQuote(t.broker.Vhost()), shellQuote(plan.queues[0].name))
	return nil
}

// exchange makes an exchange, and reports whether it can be bound as one of that
// kind.
func (t *topology) exchange(name, kind string) (ok bool, err error) {
	made, err := t.broker.DeclareExchange(name, kind)
	if err != nil {
		return false, err
	}
	if ok, err = t.broker.ExchangeIs(name, kind); err != nil {
		return false, err
	}
	if !ok {
		t.say("exchange %s: exists, and is no durable %s exchange: it is left alone, its bindings are yours", name, kind)
		return false, nil
	}
	t.say("exchange %s: %s", name, createdOr(made))
	return true, nil
}

func createdOr(made publish.Made) string {
	if made {
		return "created"
	}
	return "exists"
}

// shardPlan is what spreads the aggregates over queues.
type shardPlan struct {
	hash   string // a consistent-hash exchange between exchanges and queues; empty: none
	queues []boundQueue
}

type boundQueue struct{ name, key string }

// planShards binds one queue to everything, or N queues so that all events of one
// aggregate go to the same: by the number in the routing key, if that is what the
// template makes, or else by a hash of the key.
func planShards(template string, opts brokerOptions) (shardPlan, error) {
	if opts.shards == 0 {
		return shardPlan{queues: []boundQueue{{opts.queue, "#"}}}, nil
	}
	m := regexp.MustCompile(`^([^{}]*)\{partition:(\d+)\}([^{}]*)$`).FindStringSubmatch(template)
	if m == nil && strings.Contains(template, "{partition:") {
		return shardPlan{}, usageError{fmt.Errorf("router.routing_key %q has other placeholders beside {partition:N}: its queues cannot be bound by number", template)}
	}
	plan := shardPlan{}
	if m == nil {
		plan.hash = opts.queue + ".shards"
	} else if m[2] != strconv.Itoa(opts.shards) {
		return shardPlan{}, usageError{fmt.Errorf("router.routing_key %q has %s partitions: want --shards %s, not %d", template, m[2], m[2], opts.shards)}
	}
	for i := range opts.shards {
		q := boundQueue{name: fmt.Sprintf("%s.%d", opts.queue, i), key: "1"} // the weight of each queue
		if m != nil {
			q.key = fmt.Sprintf("%s%d%s", m[1], i, m[3])
		}
		plan.queues = append(plan.queues, q)
	}
	return plan, nil
}
