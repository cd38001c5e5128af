// Package wal reads the committed inserts of outbox tables from a PostgreSQL
// logical replication slot and acknowledges what the rest of the connector has
// made durable.
//
// # Two connections, one owner
//
// Conn is a replication connection and an ordinary one to the same server, so that
// every start-up question (Inspect) is answered by the server that will stream.
// The questions go over the ordinary one, for no SQL may run on a connection that
// streams (ADR 0006). Start turns the other into a Stream, whose reader goroutine
// owns the socket from then on: it reads, and it alone writes, so a status message
// can never be cut in half.
//
// # The state of a stream
//
//	Begin -> Insert... -> Commit     rows leave in batches while they arrive
//	keepalive outside a transaction  progress: a batch without events
//	keepalive inside one             answered, never progress
//
// The reader stops reading while nobody takes its batch, but it goes on sending
// status, so a dead broker costs nothing but retained WAL. What it reports as
// flushed is the last Ack and never anything derived: the server takes a zero
// flush position for "unknown", and client libraries that fill it in have lost
// data by it.
//
// # Ends
//
// A Stream ends on a broken connection, on Close, or when the server wants to
// stop and cannot be told that everything is published: a fast shutdown of
// PostgreSQL waits for every walsender, so a connector whose broker is down must
// leave by itself. Starting again from the saved position is the way back from
// all of them. It also ends with a *Refusal where the log no longer says what was
// committed, or says it in a form that cannot be read; that needs a person.
package wal
