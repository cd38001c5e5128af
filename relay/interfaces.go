package relay

import (
	"context"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/router"
)

// Source brings batches in commit order.
type Source interface {
	// Batches is closed when the source ends; then Err says why, nil meaning that
	// there is nothing more. The source keeps its server answered even while
	// nobody receives. The receiver owns the batch and its bytes.
	Batches() <-chan outbox.Batch
	// Ack says that everything below the LSN is durable elsewhere. It is called
	// only after Save has returned. It never blocks; the last value wins.
	Ack(offsets.LSN)
	Err() error
}

// Publisher brings messages to the broker. The relay's loop alone calls it.
type Publisher interface {
	// Publish never blocks: the caller keeps the number of unsettled messages
	// within the window. The publisher owns m until its outcome. Messages with an
	// equal OrderKey are sent, and after a reconnect sent again, in call order.
	Publish(seq uint64, m router.Message)
	// Outcomes brings exactly one outcome per Publish, in batches. A lost
	// connection is not an outcome.
	Outcomes() <-chan []router.Outcome
}

// Checkpoints is the durable home of the position.
type Checkpoints interface {
	// Save returns once the checkpoint would survive a power failure. It returns
	// offsets.ErrFenced when another process has taken over.
	Save(context.Context, offsets.Checkpoint) error
}

// Stage is a source and what the checkpoint calls the time of reading it.
type Stage struct {
	Source Source
	Phase  offsets.Phase
}
