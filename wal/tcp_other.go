//go:build !linux

package wal

import "syscall"

// setUserTimeout does nothing where TCP_USER_TIMEOUT does not exist; TCP
// keepalive and the read deadline remain.
func setUserTimeout(_, _ string, _ syscall.RawConn) error { return nil }
