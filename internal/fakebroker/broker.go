// Package fakebroker is a scripted AMQP 0-9-1 broker for tests. It speaks just
// enough of the protocol for a publisher and does exactly what its script says,
// including what a real broker does once a month: confirms out of order,
// confirms that never come, channels closed amid a burst, a peer that reads no
// more. Connections are pipes within the process, which buffer nothing.
package fakebroker

import (
	"context"
	"net"
	"sync"
)

// Message is one basic.publish as it arrived.
type Message struct {
	Conn    *Conn
	Channel uint16
	Tag     uint64 // what the channel's confirms call it, from 1

	Exchange     string
	RoutingKey   string
	Mandatory    bool
	ID           string // message_id
	DeliveryMode uint8
	Body         []byte
}

// Script is what the broker does. A nil function means the default. All are
// called by the goroutine that reads the connection, so while one runs nothing
// more is read; they may call any method of Conn and Message.
type Script struct {
	// Publish is called for each message. Default: acknowledge it.
	Publish func(Message)
	// Declare answers an exchange.declare: zero accepts, another number closes
	// the channel with that code. Default: accept.
	Declare func(c *Conn, exchange string, passive bool) (code uint16)
	// Opened is called when a connection has completed its handshake.
	Opened func(*Conn)
	// FrameMax is proposed in connection.tune. Zero means 131072.
	FrameMax uint32
}

// Broker is a scripted broker. It is used through Dial.
type Broker struct {
	script Script

	mu     sync.Mutex
	conns  map[*Conn]struct{}
	down   bool
	serves sync.WaitGroup
}

// New returns a broker that accepts connections.
func New(script Script) *Broker {
	if script.Publish == nil {
		script.Publish = func(m Message) { m.Conn.Ack(m.Channel, m.Tag, false) }
	}
	if script.Declare == nil {
		script.Declare = func(*Conn, string, bool) uint16 { return 0 }
	}
	if script.Opened == nil {
		script.Opened = func(*Conn) {}
	}
	if script.FrameMax == 0 {
		script.FrameMax = 131072
	}
	return &Broker{script: script, conns: make(map[*Conn]struct{})}
}

// Dial connects to the broker; the arguments after the context are ignored. It
// fails while the broker is down.
func (b *Broker) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	client, server := net.Pipe()
	c := &Conn{broker: b, net: server, tags: make(map[uint16]uint64), resume: make(chan struct{})}
	close(c.resume)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return nil, &net.OpError{Op: "dial", Net: "pipe", Err: net.ErrClosed}
	}
	b.conns[c] = struct{}{}
	b.serves.Go(func() {
		c.serve()
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.conns, c)
	})
	return client, nil
}

// SetDown makes dialling fail, or succeed again. Connections stay as they are.
func (b *Broker) SetDown(down bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.down = down
}

// Conns returns the connections that are open now.
func (b *Broker) Conns() []*Conn {
	b.mu.Lock()
	defer b.mu.Unlock()
	var conns []*Conn
	for c := range b.conns {
		conns = append(conns, c)
	}
	return conns
}

// Close cuts all connections and waits for their goroutines.
func (b *Broker) Close() {
	b.SetDown(true)
	for _, c := range b.Conns() {
		c.Cut()
	}
	b.serves.Wait()
}
