package main

import "sync"

// ledger is the set of events that the consumer has got.
type ledger struct {
	mu      sync.Mutex
	ids     map[string]bool
	changed chan struct{} // holds one token when ids has grown
}

func newLedger() *ledger {
	return &ledger{ids: map[string]bool{}, changed: make(chan struct{}, 1)}
}

func (l *ledger) add(id string) {
	l.mu.Lock()
	l.ids[id] = true
	l.mu.Unlock()
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// missing returns which of ids the ledger lacks.
func (l *ledger) missing(ids []string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var missing []string
	for _, id := range ids {
		if !l.ids[id] {
			missing = append(missing, id)
		}
	}
	return missing
}
