package wal

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// prober finds out whether the server is shutting down while we are behind. A
// walsender sends the whole backlog before it stops, and with a full socket it
// says nothing at all; status messages keep it waiting for ever. But the
// postmaster refuses a new connection with a code of its own, before it asks for
// a password. A connection that is kept open for this would not do: a smart
// shutdown would wait for it.
type prober struct {
	cfg    *pgconn.Config
	renew  func() (*pgconn.Config, error) // for a fresh password
	cancel context.CancelFunc
	ctx    context.Context // of running probes
	probes sync.WaitGroup
	answer chan bool
	asking bool
	next   time.Time
}

func newProber(cfg *pgconn.Config, renew func() (*pgconn.Config, error)) prober {
	ctx, cancel := context.WithCancel(context.Background())
	return prober{cfg: cfg, renew: renew, ctx: ctx, cancel: cancel, answer: make(chan bool, 1)}
}

// watchShutdown asks the server, if we are behind and did not ask just now, and
// returns ErrServerStopping once it has said so. It does not wait for the answer.
func (p *prober) watchShutdown(now time.Time, behind bool) error {
	select {
	case stopping := <-p.answer:
		p.asking = false
		if stopping && behind {
			return ErrServerStopping
		}
	default:
	}
	if behind && !p.asking && now.After(p.next) {
		p.asking, p.next = true, now.Add(stopPatience)
		p.probes.Go(func() { p.answer <- p.serverStopping() })
	}
	return nil
}

// endProbes ends a running probe and waits for it.
func (p *prober) endProbes() {
	p.cancel()
	p.probes.Wait()
}

func (p *prober) serverStopping() bool {
	ctx, cancel := context.WithTimeout(p.ctx, stopPatience)
	defer cancel()
	cfg := p.cfg.Copy()
	// With an old password every probe would be a failed login in the server's log.
	// Where no fresh one is to be had, the question is asked all the same: a server
	// that stops answers it before it asks for a password.
	if fresh, err := p.renew(); err == nil {
		cfg.Password = fresh.Password
	}
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		switch sqlState(err) {
		case "57P01", "57P02", "57P03": // admin_shutdown, crash_shutdown, cannot_connect_now
			return true
		}
		return false // whatever it is, it is no shutdown that waits for us
	}
	closing, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer stop()
	_ = conn.Close(closing) // a probe has nothing to lose
	return false
}

func (c *Conn) probeConfig() *pgconn.Config {
	cfg := c.Sibling()
	cfg.RuntimeParams["application_name"] = "cdcpub probe"
	return cfg
}
