package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mattn/go-isatty"

	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/publish"
)

const (
	narrateEvery  = 500 * time.Millisecond
	progressEvery = 2 * time.Second
	rateEvery     = 10 * time.Second
	// remindAfter is how long a trouble that was named stays unmentioned.
	remindAfter = 30 * time.Second
	maxTroubles = 3
)

// narrator tells a person at a terminal what run does: plain sentences, and few of
// them. It is given the status again and again and returns the lines to print.
type narrator struct {
	last      monitor.State
	connected bool
	idle      bool // said that it waits for events

	troubles []string  // as last seen, without their counts
	told     bool      // they were printed
	toldAt   time.Time // when

	rowsAt, rowsBegan time.Time // of the snapshot
	rowsFirst         uint64
	rowsDone          bool

	rateAt    time.Time
	rateCount uint64
}

// narrate prints what there is to say until ctx ends. Who started run by hand sees
// it; a log collector does not.
func narrate(ctx context.Context, w io.Writer, status func() monitor.Status) {
	n := narrator{}
	ticker := time.NewTicker(narrateEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			for _, line := range n.lines(now, status()) {
				fmt.Fprintln(w, line)
			}
		}
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

func (n *narrator) lines(now time.Time, s monitor.Status) []string {
	var out []string
	running := s.State == monitor.StateSnapshot || s.State == monitor.StateStreaming
	if running && s.Publisher.Connected && !n.connected {
		n.connected = true
		out = append(out, fmt.Sprintf("connected: reading slot %s (%s) and publishing", s.Source.Slot, strings.Join(s.Source.Tables, ", ")))
	}
	out = append(out, n.trouble(now, s)...)
	out = append(out, n.progress(now, s)...)
	out = append(out, n.rate(now, s)...)
	if s.State == monitor.StateStreaming && s.Publisher.Connected && !n.idle && s.Relay.Pending == 0 {
		n.idle = true
		if s.Counters.Confirmed == 0 {
			out = append(out, "waiting for events")
		}
	}
	n.last = s.State
	return out
}

// trouble says what keeps events from getting through, once it has been so for
// two looks: what heals by itself at once is no trouble.
func (n *narrator) trouble(now time.Time, s monitor.Status) []string {
	found := findTroubles(s)
	var keys, texts []string
	for _, t := range found {
		keys = append(keys, t.key)
		texts = append(texts, t.text)
	}
	same := slices.Equal(keys, n.troubles)
	n.troubles = keys
	switch {
	case len(keys) == 0 && n.told:
		n.told = false
		if s.State == monitor.StateStopping {
			return nil
		}
		return []string{"events flow again"}
	case len(keys) == 0 || !same:
		n.toldAt = time.Time{}
		return nil
	case n.toldAt.IsZero() || now.Sub(n.toldAt) >= remindAfter:
		n.told, n.toldAt = true, now
		return texts
	default:
		return nil
	}
}

// trouble is one cause that holds events up. The key is what makes it another
// one; numbers change all the time.
type trouble struct {
	key, text string
	several   string // instead of text, where that is about one of several
	events    int
}

func findTroubles(s monitor.Status) []trouble {
	one := func(format, why string) []trouble {
		return []trouble{{key: why, text: fmt.Sprintf(format, why)}}
	}
	switch {
	case s.State == monitor.StateStopping:
		return nil
	case s.Refusal != nil && s.Refusal.Hint != "":
		return one("nothing is published: %s", s.Refusal.Text+"; "+s.Refusal.Hint)
	case s.Refusal != nil:
		return one("nothing is published: %s", s.Refusal.Text)
	case s.State == monitor.StateWaiting:
		return one("nothing is read: %s", s.Reason)
	case !s.Publisher.Connected && s.Publisher.LastError != "", s.Publisher.Blocked:
		return []trouble{{key: s.Reason, text: eventsWait(s.Relay.Pending) + ": " + s.Reason}}
	default:
		return waitingTroubles(s)
	}
}

// waitingTroubles groups the waiting aggregates by what would help, those with
// the most events first.
func waitingTroubles(s monitor.Status) []trouble {
	var list []trouble
	listed := 0
	for _, w := range s.Waiting {
		t := whyWaiting(w)
		i := slices.IndexFunc(list, func(other trouble) bool { return other.key == t.key })
		if i < 0 {
			i = len(list)
			list = append(list, t)
		} else if list[i].text != t.text {
			list[i].text = list[i].several
		}
		list[i].events += w.Queued
		listed += w.Queued
	}
	slices.SortStableFunc(list, func(a, b trouble) int { return b.events - a.events })
	if len(list) == 1 {
		// The list of aggregates is cut; what they have in common surely holds for
		// the rest.
		list[0].events = max(list[0].events, s.Relay.WaitingEvents)
		listed = list[0].events
	}
	for i := range list {
		list[i].text = eventsWait(list[i].events) + ": " + list[i].text
	}
	if len(list) > maxTroubles {
		for _, t := range list[maxTroubles:] {
			listed -= t.events
		}
		list = list[:maxTroubles]
	}
	if more := s.Relay.WaitingEvents - listed; more > 0 && len(list) > 1 {
		list = append(list, trouble{key: "more", text: fmt.Sprintf("%s for other reasons; run: cdcpub status", eventsWait(more))})
	}
	return list
}

// whyWaiting is the cause in words, and the command that looks into it.
func whyWaiting(w monitor.Waiting) trouble {
	t := trouble{key: w.Cause + " " + w.Exchange}
	switch publish.Cause(w.Cause) {
	case publish.NoExchange:
		t.text = fmt.Sprintf("exchange %s is missing; run: cdcpub init --broker", w.Exchange)
	case publish.NoQueue:
		const text = "no queue is bound to exchange %s for %s; run: cdcpub init --broker"
		t.text = fmt.Sprintf(text, w.Exchange, "routing key "+w.RoutingKey)
		t.several = fmt.Sprintf(text, w.Exchange, "routing keys such as "+w.RoutingKey)
	case publish.NoRight:
		t.text = fmt.Sprintf("the user may not write to exchange %s; run: cdcpub check", w.Exchange)
	default:
		t.key, t.text = w.Reason, w.Reason
	}
	return t
}

func eventsWait(n int) string {
	if n == 1 {
		return "1 event waits"
	}
	return thousands(uint64(n)) + " events wait"
}

// progress is about the rows that are older than the slot.
func (n *narrator) progress(now time.Time, s monitor.Status) []string {
	p := s.Snapshot
	switch {
	case p == nil || n.rowsDone:
		return nil
	case n.rowsBegan.IsZero():
		n.rowsBegan, n.rowsAt, n.rowsFirst = now, now, p.Rows
		if !p.Done {
			return nil
		}
	}
	if p.Done {
		n.rowsDone = true
		n.rateAt, n.rateCount = now, s.Counters.Confirmed
		if p.Rows == 0 {
			return nil
		}
		return []string{fmt.Sprintf("old rows: all %s published in %s", thousands(p.Rows), max(now.Sub(n.rowsBegan), time.Second).Round(time.Second))}
	}
	if now.Sub(n.rowsAt) < progressEvery || p.Rows == 0 {
		return nil
	}
	n.rowsAt = now
	rate := float64(p.Rows-min(p.Rows, n.rowsFirst)) / now.Sub(n.rowsBegan).Seconds()
	line := fmt.Sprintf("old rows: %s published, %s/s", thousands(p.Rows), thousands(uint64(rate)))
	if p.Estimated > 0 {
		line = fmt.Sprintf("old rows: %s of about %s published (%d %%), %s/s", thousands(p.Rows), thousands(uint64(p.Estimated)),
			min(99, 100*p.Rows/uint64(p.Estimated)), thousands(uint64(rate)))
		if left := float64(p.Estimated) - float64(p.Rows); left > 0 && rate >= 1 {
			line += fmt.Sprintf(", about %s to go", time.Duration(left/rate*float64(time.Second)).Round(time.Second))
		}
	}
	return []string{line}
}

// rate is a line from time to time while events flow.
func (n *narrator) rate(now time.Time, s monitor.Status) []string {
	total := s.Counters.Confirmed
	if s.State != monitor.StateStreaming || total <= n.rateCount {
		return nil
	}
	took := now.Sub(n.rateAt)
	if !n.rateAt.IsZero() && took < rateEvery {
		return nil
	}
	published := total - n.rateCount
	first := n.rateAt.IsZero()
	n.rateAt, n.rateCount = now, total
	if first {
		return []string{fmt.Sprintf("published the first %s", events(published))}
	}
	return []string{fmt.Sprintf("published %s (%s/s), %s since the start", events(published),
		thousands(uint64(float64(published)/took.Seconds()+0.5)), thousands(total))}
}

func events(n uint64) string {
	if n == 1 {
		return "1 event"
	}
	return thousands(n) + " events"
}

// thousands writes 1234567 as 1,234,567.
func thousands(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
