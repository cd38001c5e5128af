// Package faultproxy puts a TCP proxy in front of a real server, so that a test
// can take the network away at a moment of its choice: stall it, cut it, reset it,
// refuse it.
package faultproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
)

// Proxy forwards connections made to Addr to its upstream server. Its methods may
// be called at any time, from any goroutine, and do not wait for the network.
type Proxy struct {
	upstream string
	listener net.Listener
	ctx      context.Context // ends dials that are under way at Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu       sync.Mutex
	links    map[*link]struct{}
	cuts     int           // links dialled before the last cut are too old to be added
	open     chan struct{} // closed while bytes may pass
	stalled  bool
	refusing bool
}

// link is one client's connection and the one to the server that belongs to it.
type link struct {
	client, server *net.TCPConn
	once           sync.Once
	gone           chan struct{} // closed when the connections are; frees a stalled copy
}

// Start starts a proxy for one test, closed at its cleanup.
func Start(t testing.TB, upstream string) *Proxy {
	t.Helper()
	p, err := New(upstream)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// New starts a proxy in front of upstream, a host:port. Whether anybody listens
// there is looked at only for each connection.
func New(upstream string) (*Proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for proxy: %w", err)
	}
	p := &Proxy{upstream: upstream, listener: listener, links: make(map[*link]struct{}), open: make(chan struct{})}
	close(p.open)
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is the host:port that clients connect to. It stays the same for the
// proxy's whole life.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Stall stops all copying, in both directions, while connections stay open and
// new ones are accepted, like a network that swallows packets: the buffers of the
// peers' sockets fill until their writes block. Bytes that reach the proxy after
// Stall has returned stay there, and so does the news that a peer has closed.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stalled {
		p.stalled, p.open = true, make(chan struct{})
	}
}

// Resume ends a stall; nothing sent meanwhile is lost.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stalled {
		p.stalled = false
		close(p.open)
	}
}

// Cut closes all connections, on both sides, and goes on accepting new ones. What
// the proxy had not forwarded is lost; a peer whose bytes it had not even read
// sees a reset rather than an end (RFC 2525, section 2.17).
func (p *Proxy) Cut() {
	for _, l := range p.cutLinks() {
		l.close()
	}
}

// Reset is Cut with a TCP reset to both sides, as after the crash of a machine.
func (p *Proxy) Reset() {
	for _, l := range p.cutLinks() {
		l.reset()
	}
}

func (p *Proxy) cutLinks() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cuts++
	links := make([]*link, 0, len(p.links))
	for l := range p.links {
		links = append(links, l)
	}
	return links
}

// Refuse makes every new connection end with a reset as soon as it is accepted.
// The port stays taken, so that Accept cannot fail. Existing connections go on.
func (p *Proxy) Refuse() { p.setRefusing(true) }

// Accept ends Refuse.
func (p *Proxy) Accept() { p.setRefusing(false) }

func (p *Proxy) setRefusing(refusing bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = refusing
}

// Close closes the port and all connections, and waits until no goroutine is left.
func (p *Proxy) Close() {
	p.cancel()
	_ = p.listener.Close()
	p.Cut()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // such as a client that went away before it was accepted
		}
		// The state counts as it is now: a cut that follows concerns this client.
		p.mu.Lock()
		refusing, cuts := p.refusing, p.cuts
		p.mu.Unlock()
		client := conn.(*net.TCPConn)
		if refusing {
			abort(client)
			continue
		}
		p.wg.Go(func() { p.serve(client, cuts) })
	}
}

func (p *Proxy) serve(client *net.TCPConn, cuts int) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(p.ctx, "tcp", p.upstream)
	if err != nil {
		abort(client)
		return
	}
	l := &link{client: client, server: conn.(*net.TCPConn), gone: make(chan struct{})}
	if !p.add(l, cuts) {
		l.reset()
		return
	}
	var copies sync.WaitGroup
	copies.Go(func() { p.copy(l, l.server, l.client) })
	copies.Go(func() { p.copy(l, l.client, l.server) })
	copies.Wait()
	l.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// add registers l, unless connections were cut after its client was accepted.
func (p *Proxy) add(l *link, cuts int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if cuts != p.cuts {
		return false
	}
	p.links[l] = struct{}{}
	return true
}

// copy forwards until src ends, which it passes on for this direction alone: a
// server's last words are not lost because the client still writes. An error
// takes down both directions.
func (p *Proxy) copy(l *link, dst, src *net.TCPConn) {
	buf := make([]byte, 32<<10)
	for {
		if !p.pass(l) {
			return
		}
		n, err := src.Read(buf)
		// The stall may have begun while Read waited.
		if !p.pass(l) {
			return
		}
		if _, writeErr := dst.Write(buf[:n]); writeErr != nil {
			l.reset()
			return
		}
		if errors.Is(err, io.EOF) {
			_ = dst.CloseWrite()
			return
		}
		if err != nil {
			l.reset()
			return
		}
	}
}

// pass waits for the end of a stall; it returns false if l has been closed.
func (p *Proxy) pass(l *link) bool {
	p.mu.Lock()
	open := p.open
	p.mu.Unlock()
	select {
	case <-open:
		return true
	case <-l.gone:
		return false
	}
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.gone)
		_ = l.client.Close()
		_ = l.server.Close()
	})
}

func (l *link) reset() {
	l.once.Do(func() {
		close(l.gone)
		abort(l.client)
		abort(l.server)
	})
}

// abort closes conn with a reset: no linger time means that nothing is sent on.
func abort(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}
