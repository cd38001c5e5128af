package wal

import (
	"context"
	"crypto/tls"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// serverStopping asks the server, over a connection of its own, whether it is
// shutting down. A walsender whose socket is full says nothing, and one that we
// keep alive with status messages waits for ever; but the postmaster refuses a
// new connection with a code of its own, before it asks for a password.
func (s *Stream) serverStopping(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, s.probeConfig())
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

// probeConfig asks the very server that we stream from, in the way in which it
// was reached.
func (s *Stream) probeConfig() *pgconn.Config {
	cfg := s.params.Copy()
	// An ordinary connection: our walsender may be the last that is allowed.
	delete(cfg.RuntimeParams, "replication")
	delete(cfg.RuntimeParams, "wal_sender_timeout")
	cfg.RuntimeParams["application_name"] = "cdcpub probe"
	cfg.OnNotice, cfg.ValidateConnect, cfg.Fallbacks = nil, nil, nil
	if addr, ok := s.pg.Conn().RemoteAddr().(*net.TCPAddr); ok {
		cfg.Host, cfg.Port = addr.IP.String(), uint16(addr.Port)
	}
	if _, encrypted := s.pg.Conn().(*tls.Conn); !encrypted {
		cfg.TLSConfig = nil
	}
	return cfg
}
