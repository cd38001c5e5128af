package offsets

import "fmt"

// Row names one outbox row: its table as "schema.name" and its event ID.
type Row struct {
	Table string `json:"table"`
	ID    string `json:"id"`
}

// Position says how far the stream has been read.
//
// LSN is where a restart begins: a Commit.TransactionEndLSN, the slot's
// consistent point, or a drained keepalive's WAL end. Everything that committed
// below it is published. The server's replay boundary is inclusive, so it is
// stored and acknowledged exactly, never plus one (PostgreSQL 18
// src/backend/replication/logical/snapbuild.c, SnapBuildXactNeedsSkip).
//
// Tx, Done and Last are set while a transaction is being read: of the
// transaction whose Begin.FinalLSN is Tx, the first Done in-scope events are
// published too, and the last of those is Last. There is no server-side resume
// inside a transaction: after a restart at LSN the whole of it arrives again
// and the reader skips Done events.
//
// The position of one event is the position after it: Done is its ordinal in
// its transaction, counted from one.
type Position struct {
	LSN  LSN    `json:"lsn"`
	Tx   LSN    `json:"tx,omitzero"`
	Done uint64 `json:"done,omitzero"`
	Last Row    `json:"last,omitzero"`
}

// IsZero reports whether p is no position at all.
func (p Position) IsZero() bool { return p == Position{} }

// Restart returns p without its progress inside a transaction.
func (p Position) Restart() Position { return Position{LSN: p.LSN} }

// String is for people: "0/16B3748", or "0/16B3748 + 12 of 0/16B9000" inside a
// transaction.
func (p Position) String() string {
	if p.Tx.IsZero() {
		return p.LSN.String()
	}
	return fmt.Sprintf("%s + %d of %s", p.LSN, p.Done, p.Tx)
}
