//go:build !linux

package publish

import "syscall"

// setUserTimeout does nothing: heartbeats and keepalive notice a lost peer.
func setUserTimeout(string, string, syscall.RawConn) error { return nil }
