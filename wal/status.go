package wal

import (
	"encoding/binary"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
)

// postgresEpochMicros is the origin of the timestamps in replication messages.
const postgresEpochMicros = 946_684_800_000_000 // 2000-01-01 in Unix microseconds

// appendStatus appends a Standby status update ("Streaming Replication
// Protocol" in the PostgreSQL documentation). It encodes exactly what it is
// given: pglogrepl's encoder replaces a zero flush position by the written one
// and thereby acknowledges what was merely received.
func appendStatus(b []byte, written, flushed offsets.LSN, now time.Time, reply bool) []byte {
	b = append(b, 'r')
	b = binary.BigEndian.AppendUint64(b, uint64(written))
	b = binary.BigEndian.AppendUint64(b, uint64(flushed))
	b = binary.BigEndian.AppendUint64(b, uint64(flushed)) // applied
	b = binary.BigEndian.AppendUint64(b, uint64(now.UnixMicro()-postgresEpochMicros))
	if reply {
		return append(b, 1)
	}
	return append(b, 0)
}
