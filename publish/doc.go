// Package publish hands messages to RabbitMQ and says, once per message, what
// became of it.
//
// A message belongs to a lane, chosen by a stable hash of its OrderKey. A lane
// is one FIFO of unsettled messages and, while the broker is there, one channel
// in confirm mode. Lanes share a few connections (links). The exchanges that
// messages name are checked on a connection of their own, so that a missing one
// cannot close a channel that carries other messages.
//
// # The life of a message
//
//	          Publish
//	             |
//	             v           not valid; exchange missing or forbidden
//	  +----> waiting ----------------------------------------> decided
//	  |          |                                                |
//	  |          | sent, in FIFO order                            |
//	  |          v                                                |
//	  +----- in flight                                            |
//	channel      |  acked and not returned -> Confirmed           |
//	died, or     |  returned               -> Returned            |
//	no confirm   |  nacked                 -> Nacked              |
//	in time      v                                                v
//	          settled, in FIFO order: one Outcome <---------------+
//
// A channel that dies with messages in flight decides nothing: the broker has
// processed some prefix of what was sent. The lane goes back to its first
// unsettled message and sends all of them again, in order. So a queue may see a
// message twice, but sees first occurrences in order.
//
// A message that is decided without being sent still waits for its turn, so its
// outcome too may wait for the broker to come back.
//
// # What a lane may have in flight
//
//	after any teardown   one message, until the broker has answered for it
//	else                 Config.PerChannel
//	isolating            one message
//	trying an exchange   one message
//	never                two messages with the same message_id, because a
//	                     basic.return names the message by nothing else
//
// A lane isolates when the broker closed its channel (or connection) with 403,
// 404, 406 or 501: one of the messages in flight is to blame, and the error does
// not say which. They are sent again one at a time. The one that ends the
// channel twice while it is alone in flight is reported as Returned (403, 404)
// or Refused (406, 501), and the others go on. After a 501, which ends a whole
// connection, the lanes of that connection take turns.
//
// A 403 concerns more than its message: the exchange is internal, or the user
// may not write to it. So messages to it are Returned without being sent, in all
// lanes, for a few seconds. Then the next one is sent, alone, and its end opens
// the exchange again or closes it for as long. A topic permission that forbids
// only some routing keys makes those with the others wait in the same way.
//
// # Goroutines
//
//	link.run        one per connection: dials, watches, reconnects for ever
//	transport.run   one per live connection: writes what has accumulated
//	lane.run        one per lane: opens a channel and sends
//	lane.settle     one per open channel: waits for the oldest confirm, then
//	                reads the returns that came before it, then decides
//	exchanges.run   one: checks exchanges on the control connection
//
// Nothing here blocks in a socket write. amqp091-go publishes under a lock that
// its own shutdown needs, so a write that blocks, because the broker has raised
// a memory alarm and reads no more, could be ended neither by heartbeats nor by
// Connection.CloseDeadline (amqp091-go issues #32, #111, #178). The transport
// accepts every write at once; what bounds its memory is the caller's window.
package publish
