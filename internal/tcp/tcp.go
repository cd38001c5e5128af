// Package tcp makes connections that notice a peer which has vanished.
package tcp

import (
	"net"
	"syscall"
	"time"
)

const (
	keepAliveIdle     = 10 * time.Second
	keepAliveInterval = 5 * time.Second
	keepAliveCount    = 3

	// UserTimeout is how long sent data may stay unacknowledged by the peer's
	// kernel. On Linux it replaces the count of keepalive probes (tcp(7)), so it
	// says the same. It also ends a connection whose peer acknowledges but keeps
	// its receive window closed for so long.
	UserTimeout = keepAliveIdle + keepAliveCount*keepAliveInterval
)

// NewDialer returns a dialer with keepalive and UserTimeout.
func NewDialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: keepAliveIdle, Interval: keepAliveInterval, Count: keepAliveCount,
		},
		Control: func(_, _ string, c syscall.RawConn) error { return SetUserTimeout(c, UserTimeout) },
	}
}
