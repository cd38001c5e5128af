// Package offsets answers one question: how far may the replication slot be
// acknowledged?
//
// LSN and Position say where in the log something is, Checkpoint is what a
// connector must remember over a crash, and Tracker turns confirms that arrive
// in any order into the one position that may be saved and then acknowledged.
// The package is pure: no I/O, no goroutines, standard library only. A
// checkpoint's durable home is the subpackage filestore.
package offsets
