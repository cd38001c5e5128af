package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/offsets/filestore"
	"github.com/cdcpub/cdcpub/relay"
	"github.com/cdcpub/cdcpub/wal"
)

const (
	recheckAfter = 5 * time.Second
	// recheckMax bounds the wait behind an event that stopped the connector by
	// policy: each look again publishes what is behind it once more.
	recheckMax = 5 * time.Minute
	retryMin   = 250 * time.Millisecond
	retryMax   = 15 * time.Second
	// busyPatience is how long a slot may be in use before that counts as another
	// connector rather than as the remains of ours: twice the wal_sender_timeout
	// that wal sets.
	busyPatience = 45 * time.Second
	// settled is how long an attempt must have run for the next failure to be
	// news, not a repetition.
	settled = time.Minute
)

// supervise runs attempts until ctx is cancelled. Every attempt starts from the
// durable state: there is no other way of recovery.
func supervise(ctx context.Context, c *connector, exitOnRefusal bool) error {
	var failures, stops int
	var busySince time.Time
	for {
		began := time.Now()
		err := c.attempt(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > settled {
			failures, stops = 0, 0
		}
		refusal, exit := asRefusal(err)
		if refusal != nil && refusal.Code == string(wal.SlotBusy) {
			if busySince.IsZero() {
				busySince = time.Now()
			}
			if time.Since(busySince) < busyPatience {
				refusal = nil
			}
		} else {
			busySince = time.Time{}
		}
		var wait time.Duration
		switch {
		case refusal != nil && exitOnRefusal:
			return &refusedError{*refusal, exit}
		case refusal != nil:
			if c.board.refuse(*refusal) {
				c.log.Error("refused to go on", "reason", refusal.Text, "hint", refusal.Hint, "code", refusal.Code)
			}
			wait = recheck(err, &stops)
		default:
			failures++
			wait = jitter(failures)
			c.board.wait(err)
			c.log.Warn("starting again", "error", err, "in", wait.Round(time.Millisecond))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// recheck is how long to leave a refusal alone. An event that is at fault itself
// will be with the same configuration, which needs a new process.
func recheck(err error, stops *int) time.Duration {
	var stopped *relay.StoppedError
	if !errors.As(err, &stopped) {
		return recheckAfter
	}
	if !stopped.Curable {
		return math.MaxInt64
	}
	*stops++
	return min(recheckAfter<<min(*stops-1, 10), recheckMax)
}

// jitter is retryMin and a random wait on top, up to retryMin doubled with each
// failure: after a failover all connectors of a database come back at once.
func jitter(failures int) time.Duration {
	limit := retryMax
	if failures < 7 {
		limit = min(retryMin<<failures, retryMax)
	}
	return retryMin + rand.N(limit)
}

// asRefusal tells what needs a person from what time may heal, and gives the
// exit code of --exit-on-refusal.
func asRefusal(err error) (*monitor.Refusal, int) {
	var refused *wal.Refusal
	var stopped *relay.StoppedError
	var corrupt *filestore.CorruptError
	var newer *filestore.VersionError
	var locked *filestore.LockedError
	switch {
	case errors.As(err, &refused):
		exit := exitUsage
		switch refused.Cause {
		case wal.Gap:
			exit = exitGap
		case wal.SlotLost:
			exit = exitSlotLost
		}
		return &monitor.Refusal{Code: string(refused.Cause), Text: refused.Text, Hint: refused.Hint}, exit
	case errors.As(err, &stopped):
		hint := "the log keeps the row as it was inserted: change the columns, the templates or publish.max_message_bytes so that it can be published, and start run anew"
		if stopped.Curable {
			hint = "let a queue take it, or change the relay.on_... policy"
		}
		return &monitor.Refusal{Code: "policy", Text: stopped.Error(), Hint: hint}, exitPolicy
	case errors.As(err, &corrupt), errors.As(err, &newer):
		return &monitor.Refusal{Code: "state", Text: err.Error()}, exitGap
	case errors.As(err, &locked):
		return &monitor.Refusal{Code: "locked", Text: err.Error(), Hint: "give each connector an offsets.path of its own"}, exitUsage
	default:
		return nil, 0
	}
}
