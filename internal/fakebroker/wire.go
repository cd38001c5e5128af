package fakebroker

import (
	"encoding/binary"
	"io"
)

func frame(kind byte, channel uint16, payload []byte) []byte {
	b := []byte{kind}
	b = binary.BigEndian.AppendUint16(b, channel)
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	b = append(b, payload...)
	return append(b, frameEnd)
}

func methodBytes(channel uint16, method uint32, arguments []byte) []byte {
	return frame(frameMethod, channel, append(binary.BigEndian.AppendUint32(nil, method), arguments...))
}

func closeBytes(code uint16, text string) []byte {
	p := binary.BigEndian.AppendUint16(nil, code)
	p = appendShort(p, text)
	return append(p, 0, 60, 0, 40) // blames basic.publish
}

func appendShort(b []byte, s string) []byte { return append(append(b, byte(len(s))), s...) }

func appendLong(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(s))), s...)
}

func readFrame(r io.Reader) (kind byte, channel uint16, payload []byte, err error) {
	var h [7]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, 0, nil, err
	}
	payload = make([]byte, binary.BigEndian.Uint32(h[3:])+1)
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, 0, nil, err
	}
	return h[0], binary.BigEndian.Uint16(h[1:]), payload[:len(payload)-1], nil
}

// reader takes values off the front of b. The client is our own library, so
// running over the end is a broken invariant and panics.
type reader struct{ b []byte }

func (r *reader) skip(n int) { r.b = r.b[n:] }

func (r *reader) byte() byte {
	v := r.b[0]
	r.skip(1)
	return v
}

func (r *reader) uint16() uint16 {
	v := binary.BigEndian.Uint16(r.b)
	r.skip(2)
	return v
}

func (r *reader) uint32() uint32 {
	v := binary.BigEndian.Uint32(r.b)
	r.skip(4)
	return v
}

func (r *reader) short() string {
	n := int(r.byte())
	v := string(r.b[:n])
	r.skip(n)
	return v
}

// partialMessage is a message whose frames have not all arrived.
type partialMessage struct {
	Message
	missing uint64
}

func newPartial(c *Conn, channel uint16, r *reader) *partialMessage {
	m := &partialMessage{Message: Message{Conn: c, Channel: channel}}
	r.skip(2)
	m.Exchange, m.RoutingKey = r.short(), r.short()
	m.Mandatory = r.byte()&1 != 0
	return m
}

// add takes a header or body frame, and reports whether the message is whole.
func (m *partialMessage) add(kind byte, p []byte) bool {
	if kind == frameBody {
		m.Body = append(m.Body, p...)
		m.missing -= uint64(len(p))
		return m.missing == 0
	}
	r := &reader{b: p}
	r.skip(4)
	m.missing = uint64(r.uint32())<<32 | uint64(r.uint32())
	flags := r.uint16()
	if flags&0x8000 != 0 { // content_type
		r.short()
	}
	if flags&0x4000 != 0 { // content_encoding
		r.short()
	}
	if flags&0x2000 != 0 { // headers
		r.skip(int(r.uint32()))
	}
	if flags&0x1000 != 0 {
		m.DeliveryMode = r.byte()
	}
	if flags&0x0800 != 0 { // priority
		r.byte()
	}
	for _, bit := range [...]uint16{0x0400, 0x0200, 0x0100} { // correlation_id, reply_to, expiration
		if flags&bit != 0 {
			r.short()
		}
	}
	if flags&0x0080 != 0 {
		m.ID = r.short()
	}
	return m.missing == 0
}
