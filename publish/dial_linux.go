package publish

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// setUserTimeout makes a write to a peer that has vanished fail within
// userTimeout; by default Linux retransmits for about a quarter of an hour
// (tcp_retries2).
func setUserTimeout(_, _ string, c syscall.RawConn) error {
	var err error
	if cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	}); cerr != nil {
		return cerr
	}
	return err
}
