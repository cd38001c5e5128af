package publish

import (
	"net"
	"sync"
	"time"

	"github.com/cdcpub/cdcpub/internal/tcp"
)

const (
	// flushTimeout bounds how long Close goes on writing. It is enough for a
	// connection.close-ok, which the library writes just before.
	flushTimeout = time.Second
	// keepBuffer is the largest buffer kept for reuse, so that one burst does
	// not hold memory for ever.
	keepBuffer = 1 << 20
)

// transport is a net.Conn whose Write never blocks. It copies the bytes and one
// goroutine writes what has accumulated meanwhile: under load hundreds of
// messages share one system call, without load none waits. It does not limit
// what accumulates; the publisher's window does.
//
// A write that fails later is no loss of information: only a confirm says that
// a message has arrived.
type transport struct {
	net.Conn          // TLS or TCP; reads and deadlines go straight to it
	raw      net.Conn // TCP

	mu      sync.Mutex
	pending []byte
	closing bool
	err     error // of the first failed write; sticky

	wake chan struct{} // capacity 1: pending or closing has changed
	done chan struct{} // closed when run has ended and the connection is closed
}

// newTransport takes over inner, and raw beneath it, which may be the same.
func newTransport(inner, raw net.Conn) *transport {
	t := &transport{Conn: inner, raw: raw, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go t.run()
	return t
}

// Write accepts b unless the connection has failed or is closed. It copies b,
// because the library reuses its buffer.
func (t *transport) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return 0, t.err
	}
	if t.closing {
		return 0, net.ErrClosed
	}
	t.pending = append(t.pending, b...)
	t.signal()
	return len(b), nil
}

func (t *transport) signal() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

func (t *transport) run() {
	defer close(t.done)
	defer t.Conn.Close()
	var spare []byte
	for range t.wake {
		t.mu.Lock()
		batch, closing := t.pending, t.closing
		t.pending = spare[:0]
		t.mu.Unlock()
		if len(batch) > 0 {
			if _, err := t.Conn.Write(batch); err != nil {
				t.fail(err)
				return
			}
		}
		if closing {
			return // Write accepts nothing more, so batch was the last
		}
		spare = batch
		if cap(spare) > keepBuffer {
			spare = nil
		}
	}
}

func (t *transport) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err, t.pending = err, nil
}

// Close writes what is pending, within flushTimeout, and closes the connection.
// It does not wait for that: the library calls it while holding locks.
func (t *transport) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closing {
		t.closing = true
		_ = t.SetWriteDeadline(time.Now().Add(flushTimeout)) // fails only if closed already
		t.signal()
	}
	return nil
}

// Abort closes the connection at once. What is pending here or in the kernel is
// dropped: a close without SO_LINGER 0 would have the kernel go on sending it
// in the background, after messages that were sent again on a new connection.
func (t *transport) Abort() {
	if conn, ok := t.raw.(*net.TCPConn); ok {
		_ = conn.SetLinger(0) // fails only if closed already
	}
	_ = t.raw.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closing, t.pending = true, nil
	t.signal()
}

// setUserTimeout changes how long the kernel waits for the peer; zero is its
// default. It is of no effect on what is not TCP.
func (t *transport) setUserTimeout(d time.Duration) {
	conn, ok := t.raw.(*net.TCPConn)
	if !ok {
		return
	}
	if raw, err := conn.SyscallConn(); err == nil {
		_ = tcp.SetUserTimeout(raw, d) // fails only if closed already
	}
}
