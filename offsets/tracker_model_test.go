package offsets_test

import (
	"encoding/binary"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/cdcpub/cdcpub/offsets"
)

// model is the tracker's specification as slowly and plainly as it can be
// written: it forgets nothing and works out every answer from the beginning. Its
// marks are numbered from 0 in the order of Add, so that a mark's value says how
// new it is.
type model struct {
	done []bool // by seq
	ends []int  // by mark: how many events precede it or belong to it
}

func (m *model) add(n int) (firstSeq uint64, mark int) {
	firstSeq = uint64(len(m.done))
	m.done = append(m.done, make([]bool, n)...)
	m.ends = append(m.ends, len(m.done))
	return firstSeq, len(m.ends) - 1
}

func (m *model) safe() (mark int, ok bool) {
	oldest := m.oldestUnfinished()
	for i := len(m.ends) - 1; i >= 0; i-- {
		if oldest >= m.ends[i] {
			return i, true
		}
	}
	return 0, false
}

func (m *model) oldestUnfinished() int {
	for seq, done := range m.done {
		if !done {
			return seq
		}
	}
	return len(m.done)
}

func (m *model) unfinished() []uint64 {
	var seqs []uint64
	for seq, done := range m.done {
		if !done {
			seqs = append(seqs, uint64(seq))
		}
	}
	return seqs
}

// pair drives a tracker and the model in step. After each operation it compares
// every answer, and checks the promises of Tracker's doc comment without the
// help of the model's safe, which could be wrong in the same way.
type pair struct {
	t interface {
		Helper()
		Fatalf(format string, args ...any)
	}
	tracker  offsets.Tracker[int]
	model    model
	previous int // the safe mark after the last operation, -1 for none
}

func newPair(t *testing.T) *pair { return &pair{t: t, previous: -1} }

func (p *pair) add(n int) {
	p.t.Helper()
	want, mark := p.model.add(n)
	if got := p.tracker.Add(n, mark); got != want {
		p.t.Fatalf("Add(%d, mark %d) = seq %d, want %d", n, mark, got, want)
	}
	p.check()
}

func (p *pair) done(seq uint64) {
	p.t.Helper()
	p.model.done[seq] = true
	p.tracker.Done(seq)
	p.check()
}

func (p *pair) check() {
	p.t.Helper()
	unfinished := p.model.unfinished()
	if got := p.tracker.Pending(); got != len(unfinished) {
		p.t.Fatalf("Pending() = %d, want %d", got, len(unfinished))
	}
	if got, want := p.tracker.Span(), len(p.model.done)-p.model.oldestUnfinished(); got != want {
		p.t.Fatalf("Span() = %d, want %d", got, want)
	}
	mark, ok := p.tracker.Safe()
	if wantMark, wantOK := p.model.safe(); mark != wantMark || ok != wantOK {
		p.t.Fatalf("Safe() = %d, %t, want %d, %t", mark, ok, wantMark, wantOK)
	}
	if !ok {
		if p.previous >= 0 {
			p.t.Fatalf("Safe() forgot mark %d", p.previous)
		}
		return
	}
	if len(unfinished) > 0 && unfinished[0] < uint64(p.model.ends[mark]) {
		p.t.Fatalf("Safe() = mark %d, which covers the unfinished event %d", mark, unfinished[0])
	}
	if mark < p.previous {
		p.t.Fatalf("Safe() went back from mark %d to %d", p.previous, mark)
	}
	if len(unfinished) == 0 && mark != len(p.model.ends)-1 {
		p.t.Fatalf("all is done and Safe() = mark %d, want the last, %d", mark, len(p.model.ends)-1)
	}
	p.previous = mark
}

// finish confirms what is left, oldest last, so that nothing is released before
// the very last Done.
func (p *pair) finish() {
	p.t.Helper()
	left := p.model.unfinished()
	for i := len(left) - 1; i >= 0; i-- {
		p.done(left[i])
	}
}

func TestTrackerAgreesWithTheModelOnRandomSchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &pair{t: t, previous: -1}
		// The largest batch decides which edges a run meets: many tiny batches
		// exercise the marks, long ones the words of the ring and its growth.
		largest := rapid.SampledFrom([]int{1, 3, 64, 200}).Draw(t, "largest batch")
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				p.add(rapid.IntRange(0, largest).Draw(t, "events"))
			},
			"done in any order": func(t *rapid.T) {
				if open := p.model.unfinished(); len(open) > 0 {
					p.done(rapid.SampledFrom(open).Draw(t, "seq"))
				}
			},
			"done, the oldest few": func(t *rapid.T) {
				open := p.model.unfinished()
				for _, seq := range open[:rapid.IntRange(0, len(open)).Draw(t, "how many")] {
					p.done(seq)
				}
			},
		})
		p.finish()
	})
}

// Not random: every order of five events in every split into batches, with an
// empty batch possible after each but the last.
func TestTrackerHoldsForEveryOrderOfFiveEvents(t *testing.T) {
	splits := splitsOf(5)
	if len(splits) != 81 {
		t.Fatalf("%d splits of five events, want 81", len(splits))
	}
	orders := ordersOf([]uint64{0, 1, 2, 3, 4})
	if len(orders) != 120 {
		t.Fatalf("%d orders of five events, want 120", len(orders))
	}
	for _, batches := range splits {
		for _, order := range orders {
			p := newPair(t)
			for _, n := range batches {
				p.add(n)
			}
			for _, seq := range order {
				p.done(seq)
			}
		}
	}
}

func splitsOf(events int) [][]int {
	splits := [][]int{{events}}
	for first := 1; first < events; first++ {
		for _, rest := range splitsOf(events - first) {
			splits = append(splits, append([]int{first}, rest...), append([]int{first, 0}, rest...))
		}
	}
	return splits
}

func ordersOf(seqs []uint64) [][]uint64 {
	if len(seqs) == 0 {
		return [][]uint64{nil}
	}
	var orders [][]uint64
	for i, first := range seqs {
		rest := slices.Delete(slices.Clone(seqs), i, i+1)
		for _, order := range ordersOf(rest) {
			orders = append(orders, append([]uint64{first}, order...))
		}
	}
	return orders
}

// FuzzTracker turns bytes into a schedule. Each operation takes two bytes: an
// even first byte adds as many events as the second says, an odd one finishes
// an event, chosen by both among the unfinished ones.
func FuzzTracker(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 0})                               // an idle database's keepalive
	f.Add([]byte{0, 3, 1, 2, 1, 1, 1, 0})             // newest first
	f.Add([]byte{0, 1, 0, 0, 0, 0, 1, 0, 0, 0})       // keepalives behind an unfinished event
	f.Add([]byte{0, 64, 1, 63, 0, 64, 1, 0, 0, 255})  // edges of words
	f.Add([]byte{0, 200, 1, 0, 1, 0, 0, 255, 255, 9}) // growth with a shifted start
	f.Fuzz(func(t *testing.T, schedule []byte) {
		const longest = 200 // operations; the model's cost grows with their square
		p := newPair(t)
		for op := 0; len(schedule) >= 2 && op < longest; op++ {
			first, second := schedule[0], schedule[1]
			choice := int(binary.BigEndian.Uint16(schedule))
			schedule = schedule[2:]
			if first%2 == 0 {
				p.add(int(second))
			} else if open := p.model.unfinished(); len(open) > 0 {
				p.done(open[choice%len(open)])
			}
		}
		if len(p.model.done) <= 2_000 {
			p.finish()
		}
	})
}
