package publish

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// setUserTimeout makes a write to a peer that has vanished fail within d. Zero
// restores Linux's default, which retransmits for about a quarter of an hour
// (tcp_retries2).
func setUserTimeout(c syscall.RawConn, d time.Duration) error {
	var err error
	if cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	}); cerr != nil {
		return cerr
	}
	return err
}
