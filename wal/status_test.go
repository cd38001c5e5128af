package wal

import (
	"encoding/hex"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/offsets"
)

func TestStatusIsEncodedExactly(t *testing.T) {
	at := time.Date(2000, 1, 1, 0, 0, 1, 5_000, time.UTC) // 1 s and 5 µs after PostgreSQL's epoch
	for name, tc := range map[string]struct {
		written, flushed offsets.LSN
		reply            bool
		want             string
	}{
		"flushed is reported as applied too": {
			0x16B374D848, 0x16B3740000, false,
			"72 00000016b374d848 00000016b3740000 00000016b3740000 00000000000f4245 00",
		},
		"a zero flush position stays zero whatever was written": {
			0x16B374D848, 0, false,
			"72 00000016b374d848 0000000000000000 0000000000000000 00000000000f4245 00",
		},
		"a reply is asked for by the last byte": {
			1, 1, true,
			"72 0000000000000001 0000000000000001 0000000000000001 00000000000f4245 01",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := hex.EncodeToString(appendStatus(nil, tc.written, tc.flushed, at, tc.reply))
			if want := strings.ReplaceAll(tc.want, " ", ""); got != want {
				t.Errorf("encoded\n%s, want\n%s", got, want)
			}
		})
	}
}

func TestAckNeverGoesBack(t *testing.T) {
	var s Stream
	for _, step := range []struct{ ack, want offsets.LSN }{{10, 10}, {5, 10}, {0, 10}, {11, 11}} {
		s.Ack(step.ack)
		if got := offsets.LSN(s.acked.Load()); got != step.want {
			t.Errorf("after Ack(%s) the position is %s, want %s", step.ack, got, step.want)
		}
	}
}

func TestSilenceWhileReadingEndsTheStream(t *testing.T) {
	s := Stream{skipped: new(atomic.Bool)}
	now := time.Now()
	s.lastStatus, s.caughtUp = now, now
	s.lastByte = now.Add(-silenceLimit)
	if err := s.duties(now); err != nil {
		t.Errorf("after exactly %s: %v", silenceLimit, err)
	}
	s.lastByte = s.lastByte.Add(-time.Millisecond)
	if err := s.duties(now); err == nil {
		t.Errorf("no error after more than %s without a byte", silenceLimit)
	}
}

func TestSkippedPublicationIsARefusal(t *testing.T) {
	s := Stream{skipped: new(atomic.Bool)}
	s.skipped.Store(true)
	now := time.Now()
	s.lastByte, s.lastStatus, s.caughtUp = now, now, now
	wantRefusal(t, s.duties(now), Gap)
}
