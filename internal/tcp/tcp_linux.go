package tcp

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SetUserTimeout makes a write to a peer that has vanished fail within d. Zero
// restores Linux's default, which retransmits for about a quarter of an hour
// (tcp_retries2). It does nothing on a connection that is not TCP, and on other
// systems: there keepalive alone remains.
func SetUserTimeout(c syscall.RawConn, d time.Duration) error {
	var option error
	err := c.Control(func(fd uintptr) {
		if domain, e := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN); e == nil && domain == unix.AF_UNIX {
			return
		}
		option = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
	if err == nil {
		err = option
	}
	if err != nil {
		return fmt.Errorf("set TCP_USER_TIMEOUT: %w", err)
	}
	return nil
}
