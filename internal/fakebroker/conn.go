package fakebroker

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
)

// Class and method numbers of AMQP 0-9-1, as class<<16 | method.
const (
	connectionStart     = 10<<16 | 10
	connectionStartOk   = 10<<16 | 11
	connectionTune      = 10<<16 | 30
	connectionOpen      = 10<<16 | 40
	connectionOpenOk    = 10<<16 | 41
	connectionClose     = 10<<16 | 50
	connectionCloseOk   = 10<<16 | 51
	connectionBlocked   = 10<<16 | 60
	connectionUnblocked = 10<<16 | 61
	channelOpen         = 20<<16 | 10
	channelOpenOk       = 20<<16 | 11
	channelClose        = 20<<16 | 40
	channelCloseOk      = 20<<16 | 41
	exchangeDeclare     = 40<<16 | 10
	exchangeDeclareOk   = 40<<16 | 11
	basicPublish        = 60<<16 | 40
	basicReturn         = 60<<16 | 50
	basicAck            = 60<<16 | 80
	basicNack           = 60<<16 | 120
	confirmSelect       = 85<<16 | 10
	confirmSelectOk     = 85<<16 | 11
)

const (
	frameMethod = 1
	frameHeader = 2
	frameBody   = 3
	frameEnd    = 0xCE
)

// Conn is one connection of a client. Its methods are safe for concurrent use
// and ignore that the client may be gone.
type Conn struct {
	broker *Broker
	net    net.Conn

	writes sync.Mutex

	mu     sync.Mutex
	resume chan struct{} // closed while the broker reads
	closed map[uint16]bool

	tags map[uint16]uint64 // of the reader
}

// Ack confirms tag, or all up to tag.
func (c *Conn) Ack(channel uint16, tag uint64, multiple bool) {
	c.confirm(basicAck, channel, tag, multiple)
}

// Nack rejects tag, or all up to tag.
func (c *Conn) Nack(channel uint16, tag uint64, multiple bool) {
	c.confirm(basicNack, channel, tag, multiple)
}

func (c *Conn) confirm(method uint32, channel uint16, tag uint64, multiple bool) {
	p := binary.BigEndian.AppendUint64(nil, tag)
	if multiple {
		p = append(p, 1)
	} else {
		p = append(p, 0)
	}
	c.writeOpen(channel, methodBytes(channel, method, p))
}

// Return sends m back as unroutable. A confirm does not follow by itself.
func (c *Conn) Return(m Message) {
	p := binary.BigEndian.AppendUint16(nil, 312)
	p = appendShort(p, "NO_ROUTE")
	p = appendShort(p, m.Exchange)
	p = appendShort(p, m.RoutingKey)
	b := methodBytes(m.Channel, basicReturn, p)

	h := binary.BigEndian.AppendUint16(nil, 60)
	h = binary.BigEndian.AppendUint16(h, 0)
	h = binary.BigEndian.AppendUint64(h, uint64(len(m.Body)))
	h = binary.BigEndian.AppendUint16(h, 0x0080) // message_id only
	h = appendShort(h, m.ID)
	b = append(b, frame(frameHeader, m.Channel, h)...)
	if len(m.Body) > 0 {
		b = append(b, frame(frameBody, m.Channel, m.Body)...)
	}
	c.writeOpen(m.Channel, b)
}

// CloseChannel ends one channel with an error. What the client has sent on it
// and is not read yet is ignored, as a real broker does.
func (c *Conn) CloseChannel(channel uint16, code uint16, text string) {
	c.mu.Lock()
	if c.closed == nil {
		c.closed = make(map[uint16]bool)
	}
	c.closed[channel] = true
	c.mu.Unlock()
	c.write(methodBytes(channel, channelClose, closeBytes(code, text)))
}

// Close ends the connection with an error.
func (c *Conn) Close(code uint16, text string) {
	c.write(methodBytes(0, connectionClose, closeBytes(code, text)))
}

// Cut ends the connection without a word.
func (c *Conn) Cut() {
	_ = c.net.Close()
	c.ResumeReading()
}

// Block tells the client that the broker accepts no messages for now. The
// broker goes on to read, unless StopReading is called too.
func (c *Conn) Block(reason string) {
	c.write(methodBytes(0, connectionBlocked, appendShort(nil, reason)))
}

// Unblock ends what Block began.
func (c *Conn) Unblock() { c.write(methodBytes(0, connectionUnblocked, nil)) }

// StopReading leaves everything that the client sends from the next frame on in
// the pipe.
func (c *Conn) StopReading() {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.resume:
		c.resume = make(chan struct{})
	default:
	}
}

// ResumeReading ends what StopReading began.
func (c *Conn) ResumeReading() {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.resume:
	default:
		close(c.resume)
	}
}

// writeOpen writes unless CloseChannel has ended the channel: on a closed one a
// broker says nothing more, and a client would take it for a protocol error.
func (c *Conn) writeOpen(channel uint16, b []byte) {
	if !c.isClosed(channel) {
		c.write(b)
	}
}

func (c *Conn) write(b []byte) {
	c.writes.Lock()
	defer c.writes.Unlock()
	_, _ = c.net.Write(b) // the reader notices that the client is gone
}

// serve reads frames until the connection ends.
func (c *Conn) serve() {
	defer c.net.Close()
	var protocol [8]byte
	if _, err := io.ReadFull(c.net, protocol[:]); err != nil {
		return
	}
	start := []byte{0, 9, 0, 0, 0, 0} // version, empty table
	start = appendLong(start, "PLAIN")
	start = appendLong(start, "en_US")
	c.write(methodBytes(0, connectionStart, start))

	partial := make(map[uint16]*partialMessage)
	for {
		c.mu.Lock()
		resume := c.resume
		c.mu.Unlock()
		<-resume
		kind, channel, p, err := readFrame(c.net)
		if err != nil {
			return
		}
		switch kind {
		case frameMethod:
			r := &reader{b: p}
			method := r.uint32()
			if method == basicPublish {
				partial[channel] = newPartial(c, channel, r)
			} else if !c.method(channel, method, r) {
				return
			}
		case frameHeader, frameBody:
			m := partial[channel]
			if m == nil {
				return
			}
			if m.add(kind, p) {
				delete(partial, channel)
				c.published(m.Message)
			}
		}
	}
}

func (c *Conn) published(m Message) {
	if c.isClosed(m.Channel) {
		return
	}
	c.tags[m.Channel]++
	m.Tag = c.tags[m.Channel]
	c.broker.script.Publish(m)
}

func (c *Conn) isClosed(channel uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed[channel]
}

// method answers everything but basic.publish. It returns false at the end of
// the connection.
func (c *Conn) method(channel uint16, method uint32, r *reader) bool {
	switch method {
	case connectionStartOk:
		tune := binary.BigEndian.AppendUint16(nil, 2047)
		tune = binary.BigEndian.AppendUint32(tune, c.broker.script.FrameMax)
		tune = binary.BigEndian.AppendUint16(tune, 0) // no heartbeats
		c.write(methodBytes(0, connectionTune, tune))
	case connectionOpen:
		c.write(methodBytes(0, connectionOpenOk, []byte{0}))
		c.broker.script.Opened(c)
	case connectionClose:
		c.write(methodBytes(0, connectionCloseOk, nil))
	case connectionCloseOk:
		return false
	case channelOpen:
		c.tags[channel] = 0
		c.write(methodBytes(channel, channelOpenOk, appendLong(nil, "")))
	case channelClose:
		c.write(methodBytes(channel, channelCloseOk, nil))
	case channelCloseOk:
		c.mu.Lock()
		delete(c.closed, channel)
		c.mu.Unlock()
	case confirmSelect:
		c.write(methodBytes(channel, confirmSelectOk, nil))
	case exchangeDeclare:
		r.skip(2)
		name := r.short()
		r.short() // type
		passive := r.byte()&1 != 0
		if code := c.broker.script.Declare(c, name, passive); code != 0 {
			c.CloseChannel(channel, code, "scripted refusal of exchange "+name)
		} else {
			c.write(methodBytes(channel, exchangeDeclareOk, nil))
		}
	}
	return true
}
