// Package offsets answers one question: how far may the replication slot be
// acknowledged?
//
// LSN and Position say where in the log something is, Checkpoint is what a
// connector must remember over a crash, and Tracker turns confirms that arrive
// in any order into the one position that may be saved and then acknowledged.
// The package is pure: no I/O, no goroutines, standard library only. The
// durable homes of a checkpoint are its subpackages.
package offsets
