//go:build !linux

package tcp

import (
	"syscall"
	"time"
)

// SetUserTimeout does nothing here: keepalive notices a peer that has vanished.
func SetUserTimeout(syscall.RawConn, time.Duration) error { return nil }
