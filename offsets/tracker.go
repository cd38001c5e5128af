package offsets

import (
	"fmt"
	"math/bits"
)

// Tracker decides when the slot may be acknowledged.
//
// Events are read in order and finish in any order: the broker confirms one
// late, another waits behind an unroutable key. Every event gets a number, its
// seq, in the order in which it was read. A mark is whatever the caller would
// save (a Position) once a stretch of events is behind it. The slot may be
// acknowledged up to a mark when no event that was added with it or before it
// is unfinished. Hence, at any moment:
//
//   - Safe never returns a mark that covers an unfinished event: once it is
//     acknowledged the server may remove the log that holds that event.
//   - Of the marks that cover none, Safe returns the newest, so it only moves
//     forward in the order of Add. Marks are never compared or looked into.
//   - When everything is done, Safe returns the last mark added.
//
// A mark without events of its own (a drained keepalive) obeys the same rule:
// it waits for all that was read before it, so an idle tracker lets it through
// at once and a busy one cannot be overtaken by it.
//
// A tracker remembers one bit and at most one mark for each event since the
// oldest unfinished one, and allocates only when that stretch (Span) gets longer
// than ever before: the caller bounds its memory by bounding Span. The zero
// Tracker is ready for use. It does no locking: one goroutine owns it.
type Tracker[M any] struct {
	next    uint64 // seq of the event to be added next
	base    uint64 // every event with a lower seq is done
	pending int

	// words holds the bit of seq s at bit s%64 of words[s/64%len(words)]: set
	// means done. Bits from next upwards are zero. The length is a power of two
	// and covers every word from base's to the newest event's.
	words []uint64

	// marks[head:] wait, oldest first, each with another end; all before head is
	// zeroed, so that a mark's strings do not outlive it.
	marks []mark[M]
	head  int

	safe  M
	known bool // there is a safe mark
}

// mark is passed when every event with a seq below end is done.
type mark[M any] struct {
	end   uint64
	value M
}

// Add records that n events were read, n may be 0, and that m is the mark to
// return once they and everything before them are done. The events have the
// seqs firstSeq to firstSeq+n-1: seqs count from 0 without gaps for as long as
// the tracker lives.
func (t *Tracker[M]) Add(n int, m M) (firstSeq uint64) {
	firstSeq = t.next
	t.reserve(uint64(n))
	t.next += uint64(n)
	t.pending += n
	switch last := len(t.marks) - 1; {
	case t.base == t.next:
		t.safe, t.known = m, true
	case t.head <= last && t.marks[last].end == t.next:
		// Keepalives arrive for as long as an event waits, hours if need be:
		// kept one by one they would grow without bound.
		t.marks[last].value = m
	default:
		t.push(mark[M]{t.next, m})
	}
	return firstSeq
}

// Done records that event seq is finished: the broker holds it, or it is
// durably parked. It panics when seq was never added or is done already: then
// the caller's bookkeeping is broken, and what Safe says next would be a guess.
func (t *Tracker[M]) Done(seq uint64) {
	if seq >= t.next {
		panic(fmt.Sprintf("offsets: Tracker.Done of seq %d, which was never added (next is %d)", seq, t.next))
	}
	word, bit := t.word(seq), uint64(1)<<(seq%64)
	if seq < t.base || *word&bit != 0 {
		panic(fmt.Sprintf("offsets: Tracker.Done of seq %d twice", seq))
	}
	*word |= bit
	t.pending--
	if seq == t.base {
		t.advance()
	}
}

// Safe returns the newest mark with no unfinished event at or before it; false until there is one.
func (t *Tracker[M]) Safe() (M, bool) { return t.safe, t.known }

// Pending is the number of events that were added and are not done.
func (t *Tracker[M]) Pending() int { return t.pending }

// Span is the number of events from the oldest unfinished one to the newest
// added, both included, done or not; 0 when nothing is unfinished.
func (t *Tracker[M]) Span() int { return int(t.next - t.base) }

func (t *Tracker[M]) word(seq uint64) *uint64 { return &t.words[seq/64&uint64(len(t.words)-1)] }

// reserve makes room for n more bits. The words between base's and next's move
// to their place in a longer ring.
func (t *Tracker[M]) reserve(n uint64) {
	need := (t.next+n+63)/64 - t.base/64
	if need <= uint64(len(t.words)) {
		return
	}
	longer := make([]uint64, uint64(1)<<bits.Len64(need-1))
	for w := t.base / 64; w*64 < t.next; w++ {
		longer[w&uint64(len(longer)-1)] = *t.word(w * 64)
	}
	t.words = longer
}

// advance moves base past everything done, a word at a time, and releases the
// marks it passes.
func (t *Tracker[M]) advance() {
	for t.base < t.next {
		word := t.word(t.base)
		done := bits.TrailingZeros64(^(*word >> (t.base % 64)))
		t.base += uint64(done)
		if done == 0 || t.base%64 != 0 {
			break
		}
		*word = 0 // left behind: free for a later seq
	}
	for t.head < len(t.marks) && t.marks[t.head].end <= t.base {
		t.safe, t.known = t.marks[t.head].value, true
		t.marks[t.head] = mark[M]{}
		t.head++
	}
}

// push appends a mark. It moves the waiting ones to the front only when at least
// half of the slice is free: each move is paid for by as many releases.
func (t *Tracker[M]) push(m mark[M]) {
	if len(t.marks) == cap(t.marks) && t.head > 0 && t.head >= len(t.marks)/2 {
		kept := copy(t.marks, t.marks[t.head:])
		clear(t.marks[kept:])
		t.marks, t.head = t.marks[:kept], 0
	}
	t.marks = append(t.marks, m)
}
