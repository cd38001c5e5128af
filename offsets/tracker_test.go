package offsets_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/offsets"
)

// step is one operation on a tracker and, where a case cares, what must hold
// after it. Marks are strings: they are opaque to the tracker.
type step struct {
	add  int    // events to add, if mark is set
	mark string // Add when set, otherwise Done of done
	done uint64
	want state
}

type state struct {
	Safe          string // "" for none
	Pending, Span int
}

func TestTracker(t *testing.T) {
	cases := map[string][]step{
		"a batch is safe when its only event is done": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{done: 0, want: state{"a", 0, 0}},
		},
		"a batch is not safe while its first event is unfinished": {
			{add: 3, mark: "a", want: state{"", 3, 3}},
			{done: 2, want: state{"", 2, 3}},
			{done: 1, want: state{"", 1, 3}},
			{done: 0, want: state{"a", 0, 0}},
		},
		"a batch is not safe while its last event is unfinished": {
			{add: 3, mark: "a", want: state{"", 3, 3}},
			{done: 0, want: state{"", 2, 2}},
			{done: 1, want: state{"", 1, 1}},
			{done: 2, want: state{"a", 0, 0}},
		},
		"a finished batch waits for the one before it": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{add: 2, mark: "b", want: state{"", 3, 3}},
			{done: 2, want: state{"", 2, 3}},
			{done: 1, want: state{"", 1, 3}},
			{done: 0, want: state{"b", 0, 0}},
		},
		"an unfinished batch does not hold back the one before it": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{add: 1, mark: "b", want: state{"", 2, 2}},
			{add: 1, mark: "c", want: state{"", 3, 3}},
			{done: 0, want: state{"a", 2, 2}},
			{done: 2, want: state{"a", 1, 2}},
			{done: 1, want: state{"c", 0, 0}},
		},
		"the oldest event finishes and releases part of a later batch without its mark": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{add: 3, mark: "b", want: state{"", 4, 4}},
			{done: 1, want: state{"", 3, 4}},
			{done: 3, want: state{"", 2, 4}},
			{done: 0, want: state{"a", 1, 2}},
			{done: 2, want: state{"b", 0, 0}},
		},
		"a keepalive is safe at once when nothing was ever added": {
			{mark: "k1", want: state{"k1", 0, 0}},
			{mark: "k2", want: state{"k2", 0, 0}},
		},
		"a keepalive is safe at once when everything is done": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{done: 0, want: state{"a", 0, 0}},
			{mark: "k", want: state{"k", 0, 0}},
		},
		"a keepalive does not overtake an unfinished event": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{mark: "k", want: state{"", 1, 1}},
			{done: 0, want: state{"k", 0, 0}},
		},
		"a keepalive between two batches waits for the first only": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{mark: "k", want: state{"", 1, 1}},
			{add: 1, mark: "b", want: state{"", 2, 2}},
			{done: 0, want: state{"k", 1, 1}},
			{done: 1, want: state{"b", 0, 0}},
		},
		"the newest of several keepalives behind an event wins": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{mark: "k1", want: state{"", 1, 1}},
			{mark: "k2", want: state{"", 1, 1}},
			{mark: "k3", want: state{"", 1, 1}},
			{done: 0, want: state{"k3", 0, 0}},
		},
		"a keepalive behind a released mark does not change it before its time": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{add: 1, mark: "b", want: state{"", 2, 2}},
			{done: 0, want: state{"a", 1, 1}},
			{mark: "k", want: state{"a", 1, 1}},
			{done: 1, want: state{"k", 0, 0}},
		},
		"a batch added when all is done does not take the last safe mark away": {
			{add: 1, mark: "a", want: state{"", 1, 1}},
			{done: 0, want: state{"a", 0, 0}},
			{add: 2, mark: "b", want: state{"a", 2, 2}},
			{done: 2, want: state{"a", 1, 2}},
			{done: 1, want: state{"b", 0, 0}},
		},
		"marks are not compared: the newest wins even if it looks smaller": {
			{add: 1, mark: "z", want: state{"", 1, 1}},
			{add: 1, mark: "a", want: state{"", 2, 2}},
			{done: 0, want: state{"z", 1, 1}},
			{done: 1, want: state{"a", 0, 0}},
		},
	}
	for name, steps := range cases {
		t.Run(name, func(t *testing.T) {
			var tracker offsets.Tracker[string]
			var next uint64
			for i, s := range steps {
				what := fmt.Sprintf("step %d: Done(%d)", i, s.done)
				if s.mark == "" {
					tracker.Done(s.done)
				} else {
					what = fmt.Sprintf("step %d: Add(%d, %q)", i, s.add, s.mark)
					if got := tracker.Add(s.add, s.mark); got != next {
						t.Fatalf("%s = seq %d, want %d", what, got, next)
					}
					next += uint64(s.add)
				}
				if diff := cmp.Diff(s.want, stateOf(t, &tracker)); diff != "" {
					t.Fatalf("after %s (-want +got):\n%s", what, diff)
				}
			}
		})
	}
}

func stateOf(t *testing.T, tracker *offsets.Tracker[string]) state {
	t.Helper()
	safe, ok := tracker.Safe()
	if ok != (safe != "") {
		t.Fatalf("Safe() = %q, %t", safe, ok)
	}
	return state{safe, tracker.Pending(), tracker.Span()}
}

func TestTrackerTellsNoMarkFromTheZeroMark(t *testing.T) {
	var tracker offsets.Tracker[offsets.Position]
	if _, ok := tracker.Safe(); ok {
		t.Error("a new tracker has a safe mark")
	}
	tracker.Add(0, offsets.Position{})
	if mark, ok := tracker.Safe(); !ok || !mark.IsZero() {
		t.Errorf("Safe() = %v, %t, want the zero mark that was added", mark, ok)
	}
}

// Spans around multiples of 64 meet the edges of the words that hold the bits,
// and a shifted start puts those edges in the middle of a batch.
func TestTrackerKeepsCountAcrossWordsAndGrowth(t *testing.T) {
	for _, shift := range []int{0, 1, 63, 64, 65} {
		for _, n := range []int{1, 2, 62, 63, 64, 65, 127, 128, 129, 500} {
			for _, newestFirst := range []bool{true, false} {
				t.Run(fmt.Sprintf("%d events after %d, newest first %t", n, shift, newestFirst), func(t *testing.T) {
					p := newPair(t)
					p.add(shift)
					for seq := range uint64(shift) {
						p.done(seq)
					}
					p.add(n)
					if newestFirst {
						p.finish()
						return
					}
					for i := range uint64(n) {
						p.done(uint64(shift) + i)
					}
				})
			}
		}
	}
}

func TestTrackerGrowsAroundAStuckEvent(t *testing.T) {
	p := newPair(t)
	p.add(70)
	for seq := uint64(69); seq > 0; seq-- {
		p.done(seq) // event 0 waits, say for a queue to be bound
	}
	for range 12 {
		p.add(60)
		for i := len(p.model.done) - 60; i < len(p.model.done); i += 2 {
			p.done(uint64(i))
		}
	}
	p.done(0)
	p.finish()
}

func TestTrackerPanicsWhenTheCallersBookkeepingIsBroken(t *testing.T) {
	cases := map[string]struct {
		before func(*offsets.Tracker[int])
		seq    uint64
		want   string
	}{
		"nothing was ever added": {
			before: func(*offsets.Tracker[int]) {},
			seq:    0,
			want:   "seq 0, which was never added (next is 0)",
		},
		"the batch had no events": {
			before: func(tr *offsets.Tracker[int]) { tr.Add(0, 1) },
			seq:    0,
			want:   "seq 0, which was never added (next is 0)",
		},
		"the seq is the next to be added": {
			before: func(tr *offsets.Tracker[int]) { tr.Add(2, 1) },
			seq:    2,
			want:   "seq 2, which was never added (next is 2)",
		},
		"the seq is far ahead": {
			before: func(tr *offsets.Tracker[int]) { tr.Add(2, 1) },
			seq:    1 << 63,
			want:   "seq 9223372036854775808, which was never added (next is 2)",
		},
		"the event is done and waits for an older one": {
			before: func(tr *offsets.Tracker[int]) { tr.Add(3, 1); tr.Done(1) },
			seq:    1,
			want:   "seq 1 twice",
		},
		"the event is done and released": {
			before: func(tr *offsets.Tracker[int]) { tr.Add(3, 1); tr.Done(0) },
			seq:    0,
			want:   "seq 0 twice",
		},
		"the event's word was left behind": {
			before: func(tr *offsets.Tracker[int]) {
				tr.Add(300, 1)
				for seq := range uint64(299) {
					tr.Done(seq)
				}
			},
			seq:  5,
			want: "seq 5 twice",
		},
		"everything is done": {
			before: func(tr *offsets.Tracker[int]) { tr.Add(1, 1); tr.Done(0) },
			seq:    0,
			want:   "seq 0 twice",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			var tracker offsets.Tracker[int]
			c.before(&tracker)
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasSuffix(got, c.want) {
					t.Errorf("panic %q, want one that ends in %q", got, c.want)
				}
			}()
			tracker.Done(c.seq)
		})
	}
}

// window keeps a tracker at a steady span: batches come in, and events finish
// in reverse order within groups, as confirms of several lanes may.
type window struct {
	tracker offsets.Tracker[offsets.Position]
	lsn     offsets.LSN
	oldest  uint64
}

const (
	windowBatch = 16
	windowSpan  = 2_048 // the relay's default window
)

// fill opens the window. Two full turns of steady state then let the mark
// slice find its size.
func (w *window) fill() {
	for range windowSpan / windowBatch {
		w.add()
	}
	for range 2 * windowSpan / windowBatch {
		w.turn()
	}
}

func (w *window) add() {
	w.lsn += 100
	w.tracker.Add(windowBatch, offsets.Position{LSN: w.lsn})
}

func (w *window) turn() {
	w.add()
	for i := range uint64(windowBatch) {
		w.tracker.Done(w.oldest + windowBatch - 1 - i)
	}
	w.oldest += windowBatch
}

func TestTrackerAllocatesNothingInSteadyState(t *testing.T) {
	var w window
	w.fill()
	if got := testing.AllocsPerRun(5_000, w.turn); got != 0 {
		t.Errorf("%v allocations for a batch of %d events, want 0", got, windowBatch)
	}
}

// An event that waits for hours must not make keepalives pile up behind it.
func TestTrackerKeepsOneKeepaliveBehindAStuckEvent(t *testing.T) {
	var tracker offsets.Tracker[offsets.Position]
	tracker.Add(1, offsets.Position{LSN: 1})
	last := offsets.LSN(1)
	before := heapBytes()
	for range 100_000 {
		last++
		tracker.Add(0, offsets.Position{LSN: last})
	}
	// Kept one by one they would take 6 MB.
	if grown := heapBytes() - before; grown > 64<<10 {
		t.Errorf("the heap grew by %d bytes over 100,000 keepalives", grown)
	}
	tracker.Done(0)
	if mark, ok := tracker.Safe(); !ok || mark.LSN != last {
		t.Errorf("Safe() = %v, %t, want %v", mark, ok, last)
	}
}

func TestTrackerMemoryFollowsThePeakSpanNotTheLifetime(t *testing.T) {
	var w window
	w.fill()
	before := heapBytes()
	for range 1_000_000 / windowBatch {
		w.turn()
	}
	// The heap of a test binary moves by a little; a bit for each of a million
	// events would be 125 kB, a mark for each batch 3.5 MB.
	if grown := heapBytes() - before; grown > 64<<10 {
		t.Errorf("the heap grew by %d bytes over a million events", grown)
	}
	runtime.KeepAlive(&w)
}

func TestTrackerLetsGoOfReleasedMarks(t *testing.T) {
	var tracker offsets.Tracker[*[1 << 20]byte]
	for range 8 {
		tracker.Add(1, new([1 << 20]byte))
	}
	before := heapBytes()
	for seq := range uint64(7) {
		tracker.Done(seq)
	}
	// One mark is safe and one still waits; the six before them are garbage.
	if freed := before - heapBytes(); freed < 5<<20 {
		t.Errorf("%d bytes were freed with six marks of 1 MiB released", freed)
	}
	runtime.KeepAlive(&tracker)
}

func heapBytes() int64 {
	runtime.GC()
	runtime.GC() // what the first one only finalised
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

func BenchmarkTracker(b *testing.B) {
	b.Run("window of 2048, batches of 16", func(b *testing.B) {
		var w window
		w.fill()
		b.ReportAllocs()
		for b.Loop() {
			w.turn()
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*windowBatch), "ns/event")
	})
	b.Run("single events in order", func(b *testing.B) {
		var tracker offsets.Tracker[offsets.Position]
		b.ReportAllocs()
		for b.Loop() {
			tracker.Done(tracker.Add(1, offsets.Position{LSN: 1}))
		}
	})
	b.Run("50000 events behind a stuck one", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var tracker offsets.Tracker[offsets.Position]
			tracker.Add(50_000, offsets.Position{LSN: 1})
			for seq := uint64(49_999); seq > 0; seq-- {
				tracker.Done(seq)
			}
			tracker.Done(0)
		}
	})
}
