package pgoutput

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// frame builds messages the way the documentation lays them out.
type frame struct{ bytes.Buffer }

func newFrame(kind byte) *frame {
	f := &frame{}
	f.WriteByte(kind)
	return f
}

func (f *frame) u8(v byte) *frame    { f.WriteByte(v); return f }
func (f *frame) u16(v uint16) *frame { return f.raw(binary.BigEndian.AppendUint16(nil, v)) }
func (f *frame) u32(v uint32) *frame { return f.raw(binary.BigEndian.AppendUint32(nil, v)) }
func (f *frame) u64(v uint64) *frame { return f.raw(binary.BigEndian.AppendUint64(nil, v)) }
func (f *frame) str(s string) *frame { f.WriteString(s); return f.u8(0) }
func (f *frame) raw(b []byte) *frame { f.Write(b); return f }
func (f *frame) text(s string) *frame {
	return f.u8('t').u32(uint32(len(s))).raw([]byte(s))
}

var pgEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func beginFrame() *frame { return newFrame('B').u64(0x16B3748).u64(1_500_000).u32(742) }
func commitFrame() *frame {
	return newFrame('C').u8(0).u64(0x16B3748).u64(0x16B3780).u64(1_500_000)
}

func relationFrame() *frame {
	return newFrame('R').u32(16385).str("public").str("outbox").u8('d').u16(2).
		u8(1).str("id").u32(2950).u32(0xffffffff).
		u8(0).str("payload").u32(3802).u32(0xffffffff)
}

func insertFrame() *frame {
	return newFrame('I').u32(16385).u8('N').u16(3).text("abc").u8('n').text("")
}

func TestDecode(t *testing.T) {
	for name, tc := range map[string]struct {
		data []byte
		want Message
	}{
		"begin carries the start of the commit record": {
			beginFrame().Bytes(),
			Begin{FinalLSN: 0x16B3748, CommitTime: pgEpoch.Add(1_500_000 * time.Microsecond), XID: 742},
		},
		"commit carries both ends of the commit record": {
			commitFrame().Bytes(),
			Commit{CommitLSN: 0x16B3748, EndLSN: 0x16B3780},
		},
		"relation lists its columns in order": {
			relationFrame().Bytes(),
			Relation{ID: 16385, Schema: "public", Name: "outbox", Columns: []Column{{"id", 2950}, {"payload", 3802}}},
		},
		"insert tells NULL from the empty string": {
			insertFrame().Bytes(),
			Insert{RelationID: 16385, Values: [][]byte{[]byte("abc"), nil, {}}},
		},
		"update is ignored":          {newFrame('U').u32(1).Bytes(), Ignored{'U'}},
		"delete is ignored":          {newFrame('D').u32(1).Bytes(), Ignored{'D'}},
		"truncate is ignored":        {newFrame('T').u32(1).Bytes(), Ignored{'T'}},
		"origin is ignored":          {newFrame('O').u64(1).str("o").Bytes(), Ignored{'O'}},
		"type is ignored":            {newFrame('Y').u32(1).str("s").str("t").Bytes(), Ignored{'Y'}},
		"logical message is ignored": {newFrame('M').u8(0).u64(1).str("p").u32(0).Bytes(), Ignored{'M'}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Decode(tc.data)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, got, cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })); d != "" {
				t.Errorf("decoded (-want +got):\n%s", d)
			}
		})
	}
}

func TestDecodeCopiesValues(t *testing.T) {
	data := insertFrame().Bytes()
	m, err := Decode(data)
	if err != nil {
		t.Fatal(err)
	}
	for i := range data {
		data[i] = 0xff
	}
	if got := string(m.(Insert).Values[0]); got != "abc" {
		t.Errorf("value changed with the buffer it was decoded from: %q", got)
	}
}

func TestDecodeRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		data []byte
		want string
	}{
		"an empty message":                      {nil, "empty"},
		"a message type of a later protocol":    {newFrame('S').u32(1).u8(1).Bytes(), "'S'"},
		"an unknown message type":               {newFrame('?').u64(1).Bytes(), "'?'"},
		"an unchanged TOAST value in an insert": {newFrame('I').u32(1).u8('N').u16(1).u8('u').Bytes(), "column 0 has kind 'u'"},
		"a binary value that nobody asked for":  {newFrame('I').u32(1).u8('N').u16(1).u8('b').u32(1).u8(7).Bytes(), "column 0 has kind 'b'"},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Decode(tc.data)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Decode = %v, %v; want an error with %q", m, err, tc.want)
			}
		})
	}
}

func TestDecodeOfTruncatedInputIsAnError(t *testing.T) {
	for name, whole := range map[string][]byte{
		"begin": beginFrame().Bytes(), "commit": commitFrame().Bytes(),
		"relation": relationFrame().Bytes(), "insert": insertFrame().Bytes(),
	} {
		for n := range len(whole) {
			if m, err := Decode(whole[:n:n]); err == nil {
				t.Errorf("%s cut to %d of %d bytes decoded to %+v", name, n, len(whole), m)
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, b := range [][]byte{beginFrame().Bytes(), commitFrame().Bytes(), relationFrame().Bytes(), insertFrame().Bytes()} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Decode(data)
		if (m == nil) == (err == nil) {
			t.Fatalf("Decode = %v, %v: want exactly one", m, err)
		}
	})
}
