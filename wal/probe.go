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
	cancel context.CancelFunc
	ctx    context.Context // of running probes
	probes sync.WaitGroup
	answer chan bool
	asking bool
	next   time.Time
}

func newProber(cfg *pgconn.Config) prober {
	ctx, cancel := context.WithCancel(context.Background())
	return prober{cfg: cfg, ctx: ctx, cancel: cancel, answer: make(chan bool, 1)}
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
		p.probes.Go(func() { p.answer <- serverStopping(p.ctx, p.cfg) })
	}
	return nil
}

// endProbes ends a running probe and waits for it.
func (p *prober) endProbes() {
	p.cancel()
	p.probes.Wait()
}

func serverStopping(ctx context.Context, cfg *pgconn.Config) bool {
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
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
