package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/cdcpub/cdcpub/publish"
)

const (
	// maxExchanges bounds the lines of check: templates can make an exchange for
	// each tenant.
	maxExchanges = 20
	askTimeout   = 30 * time.Second
	brokerAdmin  = "RabbitMQ administrator"
)

// brokerCheck gathers what there is to say about RabbitMQ.
type brokerCheck struct {
	cfg        Config
	management *management // nil: bindings are not visible
	findings   []finding
}

// checkBroker looks at each broker, and at the exchanges on the first that
// answers: all are nodes of one cluster.
func (a *app) checkBroker(ctx context.Context, cfg Config, destinations []destination, managementURL string) []finding {
	c := &brokerCheck{cfg: cfg}
	urls, err := cfg.brokerURLs()
	if err != nil {
		return []finding{{Name: "broker", Level: levelFail, Text: err.Error()}}
	}
	if len(urls) == 0 {
		return []finding{{Name: "broker", Level: levelFail, Text: "publish.urls is not set, so there is no broker to look at"}}
	}
	looked := false
	for _, url := range urls {
		b := c.open(ctx, url)
		if b == nil {
			continue
		}
		if !looked {
			c.openManagement(managementURL, url)
			c.exchanges(ctx, b, destinations)
		}
		looked = true
		b.Close()
	}
	return c.findings
}

func (c *brokerCheck) add(l level, name, format string, args ...any) {
	c.findings = append(c.findings, finding{Name: name, Level: l, Text: fmt.Sprintf(format, args...)})
}

func (c *brokerCheck) open(ctx context.Context, url string) *publish.Broker {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	b, err := publish.OpenBroker(ctx, url, nil, "cdcpub check")
	if err == nil {
		c.add(levelOK, "broker", "%s, virtual host %s, user %s", b, b.Vhost(), b.User())
		return b
	}
	f := finding{Name: "broker", Level: levelFail, Text: err.Error()}
	var failed *publish.OpenError
	if errors.As(err, &failed) && failed.Broker != "" {
		f.Text = fmt.Sprintf("%s, user %s: %v", failed.Broker, failed.User, err)
		user, vhost := shellQuote(failed.User), shellQuote(failed.Vhost)
		switch failed.Failure {
		case publish.FailedLogin:
			f.Fix, f.As = []string{"rabbitmqctl change_password " + user}, brokerAdmin
			f.Note = "it asks for the password; if there is no such user: rabbitmqctl add_user " + user
		case publish.FailedNoVhost:
			f.Fix, f.As = []string{"rabbitmqctl add_vhost " + vhost, c.permit(failed.Vhost, failed.User)}, brokerAdmin
		case publish.FailedAccess:
			f.Fix, f.As = []string{c.permit(failed.Vhost, failed.User)}, brokerAdmin
		}
	}
	c.findings = append(c.findings, f)
	return nil
}

// permit is the command that gives a user the rights that run needs, and no
// others.
func (c *brokerCheck) permit(vhost, user string) string {
	write := exchangePattern(c.cfg.Router.Exchange)
	configure := "^$"
	if c.cfg.Publish.Declare {
		configure = write
	}
	return fmt.Sprintf("rabbitmqctl set_permissions -p %s %s %s %s %s", shellQuote(vhost), shellQuote(user), "'"+configure+"'", shellQuote(write), "'^$'")
}

// exchangePattern is the regular expression for all exchanges that a template can
// name.
func exchangePattern(template string) string {
	literals := regexp.MustCompile(`\{[^}]*\}`).Split(template, -1)
	for i, l := range literals {
		literals[i] = regexp.QuoteMeta(l)
	}
	return "^" + strings.Join(literals, ".*") + "$"
}

func (c *brokerCheck) openManagement(url, brokerURL string) {
	if url == "" {
		return
	}
	m, err := newManagement(url, brokerURL)
	if err != nil {
		c.add(levelFail, "management", "%v", err)
		return
	}
	c.management = m
}

func (c *brokerCheck) exchanges(ctx context.Context, b *publish.Broker, destinations []destination) {
	if len(destinations) == 0 {
		c.add(levelUnknown, "exchanges", "no row in the outbox tells which exchanges events go to")
		return
	}
	for i, d := range destinations {
		if i == maxExchanges {
			c.add(levelUnknown, "exchanges", "%d more were not looked at", len(destinations)-i)
			return
		}
		if !c.exchange(ctx, b, d) {
			return
		}
	}
}

// exchange reports whether there is any use in looking at another one.
func (c *brokerCheck) exchange(ctx context.Context, b *publish.Broker, d destination) bool {
	name := "exchange " + d.Exchange
	if d.Exchange == "" {
		name = "default exchange"
	}
	exists, err := b.ExchangeExists(d.Exchange)
	switch {
	case err != nil:
		c.add(levelFail, name, "%v", err)
		return true
	case exists == publish.Forbidden:
		c.forbidden(b, name, "has no right on it, not even to ask whether it exists")
		return true
	case exists == publish.Missing && c.cfg.Publish.Declare:
		c.add(levelOK, name, "does not exist yet: run declares it, if the user may configure it")
		return true
	case exists != publish.Yes:
		c.findings = append(c.findings, finding{Name: name, Level: levelFail, Text: "does not exist", Fix: []string{"cdcpub init --broker"},
			As: "a user who may configure it", Note: "as another user: " + adminInit(c.cfg, b, brokerOptions{})})
		return true
	}
	may, err := b.MayPublish(d.Exchange, d.Keys[0])
	var blocked *publish.BlockedError
	switch {
	case errors.As(err, &blocked):
		c.findings = append(c.findings, finding{Name: "alarms", Level: levelFail, Text: blocked.Error() + "; exchanges were not looked at",
			Note: "free memory or disk on the broker, or raise its limits; rabbitmq-diagnostics alarms names them. Run waits meanwhile and loses nothing"})
		return false
	case err != nil:
		c.add(levelFail, name, "%v", err)
	case may == publish.Forbidden:
		c.forbidden(b, name, "may not write to it")
	case may != publish.Yes:
		c.add(levelFail, name, "is gone since a moment ago")
	default:
		c.bindings(ctx, b, d, name)
	}
	return true
}

func (c *brokerCheck) forbidden(b *publish.Broker, name, what string) {
	c.findings = append(c.findings, finding{Name: name, Level: levelFail, Text: fmt.Sprintf("user %s %s", b.User(), what),
		Fix: []string{c.permit(b.Vhost(), b.User())}, As: brokerAdmin,
		Note: "it replaces all rights that the user has in this virtual host; topic permissions and internal exchanges refuse with the same code"})
}

// bindings tells whether anything gets what is published, as far as that can be
// seen.
func (c *brokerCheck) bindings(ctx context.Context, b *publish.Broker, d destination, name string) {
	const may = "exists, and the user may write to it"
	if c.management == nil || d.Exchange == "" {
		c.add(levelOK, name, may+"; bindings: not looked at (AMQP cannot tell, --management URL can)")
		return
	}
	n, err := c.management.bindings(ctx, b.Vhost(), d.Exchange)
	switch {
	case err != nil:
		c.add(levelUnknown, name, may+"; bindings: %v", err)
	case n == 0:
		c.findings = append(c.findings, finding{Name: name, Level: levelFail, Text: "no queue is bound to it", Fix: []string{"cdcpub init --broker"},
			As: "a user who may configure it", Note: "as another user: " + adminInit(c.cfg, b, brokerOptions{})})
	default:
		c.add(levelOK, name, may+"; it has %d bindings", n)
	}
}

// adminInit says how init --broker is run as somebody else.
func adminInit(cfg Config, b *publish.Broker, opts brokerOptions) string {
	command := "cdcpub init --broker"
	for _, e := range opts.exchanges {
		command += " --exchange " + shellQuote(e)
	}
	if opts.queue != "" && opts.queue != defaultQueue {
		command += " --queue " + shellQuote(opts.queue)
	}
	if opts.shards > 0 {
		command += fmt.Sprintf(" --shards %d", opts.shards)
	}
	if cfg.Publish.URLsFile != "" || cfg.Publish.PasswordFile != "" {
		// A URL beside the file would be refused.
		return command + ", with a configuration whose broker URL is an administrator's"
	}
	scheme, host, _ := strings.Cut(b.String(), "://")
	return fmt.Sprintf("%s='%s://ADMIN:PASSWORD@%s/%s' %s", envBrokerURL, scheme, host, vhostPath(b.Vhost()), command)
}
