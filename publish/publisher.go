package publish

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cdcpub/cdcpub/internal/tcp"
	"github.com/cdcpub/cdcpub/router"
)

// The defaults of Config. DefaultLanes times DefaultPerChannel is the most that can be
// in flight, and matches the relay's default window.
const (
	DefaultLanes           = 4
	DefaultConnections     = 2
	DefaultPerChannel      = 512
	DefaultConfirmTimeout  = 60 * time.Second
	DefaultMaxMessageBytes = 16 << 20 // max_message_size of RabbitMQ 4.0
	DefaultWindow          = 2048
	DefaultName            = "cdcpub"
)

// maxBatch is the largest number of outcomes reported at once. It is also what
// the caller may exceed Config.Window by: one batch of a source.
const maxBatch = 256

// Config is what New needs. Zero numbers and an empty Name stand for the
// defaults; zero booleans are false.
type Config struct {
	// URLs of the brokers of one cluster, amqp or amqps. They are tried in an
	// order that is random per Publisher, so that many connectors spread.
	URLs []string
	// Renew, if set, is asked for the URLs instead, before every connection: a
	// password may have been changed meanwhile. Its errors must hold no secret.
	Renew func() ([]string, error)
	// Lanes is the number of channels. Changing it moves aggregates between
	// lanes, which is safe only while nothing is unsettled: at a restart.
	Lanes       int
	Connections int // carry the lanes; at most Lanes. One more checks exchanges.
	// PerChannel is how many messages may be unconfirmed on one channel.
	// amqp091-go scans all of them at each acknowledgement of several, so a few
	// channels with hundreds each are better than one with thousands.
	PerChannel int
	// Mandatory has the broker return what it cannot route to any queue.
	// Without it such a message is acknowledged and lost.
	Mandatory bool
	// Declare creates an exchange that does not exist, as a durable topic. One
	// that exists is used as it is, whatever its type.
	Declare bool
	// ConfirmTimeout is how long the oldest message of a lane may stay
	// unconfirmed before its connection is given up and the message sent again.
	// It does not run while the broker blocks the connection, and doubles, up
	// to ten minutes, as long as it brings no progress.
	ConfirmTimeout time.Duration
	// MaxMessageBytes limits the body. It must not exceed the broker's
	// max_message_size, which a client cannot ask for.
	MaxMessageBytes int
	// Window is the most messages that the caller lets be unsettled, give or
	// take one batch.
	Window int
	// Name is shown in the broker's list of connections.
	Name   string
	Logger hclog.Logger // nil: no log
	// TLS applies to amqps URLs. Nil verifies the server against the system's
	// certificate authorities.
	TLS *tls.Config

	// dial replaces the TCP dialer in tests.
	dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

func (c Config) withDefaults() Config {
	setInt := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	setInt(&c.Lanes, DefaultLanes)
	setInt(&c.Connections, min(DefaultConnections, c.Lanes))
	setInt(&c.PerChannel, DefaultPerChannel)
	setInt(&c.MaxMessageBytes, DefaultMaxMessageBytes)
	setInt(&c.Window, DefaultWindow)
	if c.ConfirmTimeout == 0 {
		c.ConfirmTimeout = DefaultConfirmTimeout
	}
	if c.Name == "" {
		c.Name = DefaultName
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.dial == nil {
		c.dial = tcp.NewDialer().DialContext
	}
	return c
}

func (c Config) check() error {
	switch {
	case c.Lanes < 1:
		return fmt.Errorf("lanes is %d: want at least 1", c.Lanes)
	case c.Connections < 1 || c.Connections > c.Lanes:
		return fmt.Errorf("connections is %d: want 1 to the number of lanes, %d", c.Connections, c.Lanes)
	case c.PerChannel < 1:
		return fmt.Errorf("unconfirmed messages per channel is %d: want at least 1", c.PerChannel)
	case c.ConfirmTimeout < 0:
		return fmt.Errorf("confirm timeout is %s: want a positive duration", c.ConfirmTimeout)
	case c.MaxMessageBytes < 0:
		return fmt.Errorf("largest message is %d bytes: want a positive number", c.MaxMessageBytes)
	case c.Window < 1:
		return fmt.Errorf("window is %d: want at least 1", c.Window)
	case len(c.Name) > maxShortString:
		return fmt.Errorf("connection name is %d bytes: want at most %d", len(c.Name), maxShortString)
	case len(c.URLs) == 0 && c.Renew == nil:
		return errors.New("no broker URL")
	}
	return nil
}

// Publisher publishes messages and reports their outcomes. Publish and Outcomes
// are for one goroutine, Stats and Close for any.
type Publisher struct {
	cfg       Config
	log       hclog.Logger
	lanes     []*lane
	links     []*link // of the lanes, then the control connection
	exchanges *exchanges
	outcomes  chan []router.Outcome
	counts    counts

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	done chan struct{} // closed when every goroutine has ended
}

// Validate returns why New would refuse c, or nil.
func (c Config) Validate() error {
	c = c.withDefaults()
	if err := c.check(); err != nil {
		return fmt.Errorf("configure publisher: %w", err)
	}
	_, err := c.targets()
	return err
}

// targets reads the URLs as they are now.
func (c Config) targets() ([]target, error) {
	urls := c.URLs
	if c.Renew != nil {
		var err error
		if urls, err = c.Renew(); err != nil {
			return nil, fmt.Errorf("read broker URLs: %w", err)
		}
		if len(urls) == 0 {
			return nil, errors.New("read broker URLs: there is none")
		}
	}
	targets := make([]target, len(urls))
	for i, u := range urls {
		t, err := parseTarget(u, c.TLS)
		if err != nil {
			return nil, fmt.Errorf("configure publisher: broker URL %d of %d: %w", i+1, len(urls), err)
		}
		targets[i] = t
	}
	return targets, nil
}

// shuffled returns targets in an order that is random per Publisher and the same
// at each call, as long as the number of URLs is.
func (c Config) shuffled(seed uint64) func() ([]target, error) {
	return func() ([]target, error) {
		targets, err := c.targets()
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(targets), func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
		return targets, err
	}
}

// New checks cfg and starts to connect. It does not wait for the broker and
// does not fail because the broker is away. Errors never contain a URL, since
// URLs contain passwords.
func New(cfg Config) (*Publisher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	targets := cfg.shuffled(rand.Uint64())

	p := &Publisher{
		cfg: cfg,
		log: cfg.Logger,
		// One slice per outcome is the worst case: then this is the capacity at
		// which a settler cannot block, however slow the caller is to receive.
		outcomes: make(chan []router.Outcome, cfg.Window+maxBatch),
		done:     make(chan struct{}),
	}
	p.ctx, p.stop = context.WithCancel(context.Background())
	for i := range cfg.Connections {
		p.links = append(p.links, p.newLink(fmt.Sprintf("%s publish %d", cfg.Name, i+1), targets, i))
	}
	control := p.newLink(cfg.Name+" control", targets, cfg.Connections)
	p.links = append(p.links, control)
	p.exchanges = newExchanges(control, cfg.Declare)
	for i := range cfg.Lanes {
		p.lanes = append(p.lanes, newLane(p, i, p.links[i%cfg.Connections]))
	}
	p.start()
	return p, nil
}

func (p *Publisher) start() {
	var wg sync.WaitGroup
	for _, k := range p.links {
		wg.Go(func() { k.run(p.ctx) })
	}
	wg.Go(func() { p.exchanges.run(p.ctx) })
	for _, l := range p.lanes {
		wg.Go(func() { l.run(p.ctx) })
	}
	go func() {
		wg.Wait()
		close(p.outcomes)
		close(p.done)
	}()
}

// Publish accepts m and returns at once; m, with its body and headers, belongs
// to the publisher until the outcome with this seq. Messages with an equal
// OrderKey are sent, and after a reconnect sent again, in the order of the
// calls. The caller keeps the number of unsettled messages within Config.Window
// (plus one batch of 256). After Close, Publish does nothing.
func (p *Publisher) Publish(seq uint64, m router.Message) {
	if p.ctx.Err() != nil {
		return
	}
	p.lanes[laneOf(m.OrderKey, len(p.lanes))].add(newEntry(seq, m, p.cfg.MaxMessageBytes))
}

// laneOf is FNV-1a, so that an aggregate keeps its lane over restarts, when
// messages of the process before may still be on their way through the broker.
func laneOf(key string, lanes int) int {
	h := uint32(2166136261)
	for i := range len(key) {
		h = (h ^ uint32(key[i])) * 16777619
	}
	return int(h % uint32(lanes))
}

// Outcomes delivers exactly one outcome per Publish, in batches that the
// receiver owns. Outcomes of messages with an equal OrderKey come in the order
// of Publish. A broker that is away is not an outcome: the message waits. Close
// ends delivery: what was unsettled then has no outcome, and the channel is
// closed.
func (p *Publisher) Outcomes() <-chan []router.Outcome { return p.outcomes }

// emit reports settled messages. It blocks only if the caller broke the
// window's contract.
func (p *Publisher) emit(batch []router.Outcome) {
	if len(batch) == 0 {
		return
	}
	p.counts.settled(batch)
	select {
	case p.outcomes <- batch: // preferred even while closing
		return
	default:
	}
	select {
	case p.outcomes <- batch:
	case <-p.ctx.Done():
	}
}

// Close ends every goroutine and connection without waiting for outstanding
// confirms; who wants those, receives outcomes first. Connections are closed
// properly until ctx ends and cut then, which is the only error. Close may be
// called repeatedly and from several goroutines.
func (p *Publisher) Close(ctx context.Context) error {
	p.stop()
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
	}
	for _, k := range p.links {
		k.abort(errClosing)
	}
	<-p.done
	return fmt.Errorf("close publisher: connections were cut: %w", ctx.Err())
}

var errClosing = errors.New("publisher is closed")
