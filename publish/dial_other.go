//go:build !linux

package publish

import (
	"syscall"
	"time"
)

// setUserTimeout does nothing: heartbeats and keepalive notice a lost peer.
func setUserTimeout(syscall.RawConn, time.Duration) error { return nil }
