// Package relay joins the stages: it reads batches, routes their events, has
// them published, and decides how far the source may be acknowledged.
//
//	Batches -> route -> Publish          Outcomes -> Tracker.Done
//	                                     Tracker.Safe -> Save -> Ack
//
// One goroutine, the loop of Run, owns everything here; a second one runs Save,
// so that a slow disk does not stop publishing. The order Save, then Ack, and
// the fact that only Tracker.Safe is ever saved, is the whole guarantee: what
// the server is allowed to forget is held by the broker and remembered by us.
//
// # What waits
//
// An event that the broker returned or nacked waits with backoff, and every
// later event of its aggregate waits behind it, so that the aggregate's order
// holds; other aggregates go on. The head of such a queue is tried alone until
// it is confirmed. The window limits what is at the publisher, WindowBytes what
// is held anywhere, Span how far the newest event may run ahead of the oldest
// unfinished one. Beyond any of them no batch is taken, and the source's own
// back-pressure does the rest.
//
// # Ends
//
// Cancelling the context stops reading, publishes what was taken, waits for the
// confirms up to ShutdownTimeout, saves and acknowledges. A source that fails
// ends Run in the same way, with its error; starting again from the checkpoint
// is the recovery. A source that ends cleanly is followed by the next one, once
// everything from it is confirmed and that is saved: the barrier between the
// snapshot and the stream.
package relay
