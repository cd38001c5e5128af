package wal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/wal/pgoutput"
)

// reader is the state between two messages. The goroutine of Stream.run owns it.
type reader struct {
	tables    map[uint32]Table           // ours, by OID
	relations map[uint32]*outbox.Mapping // by OID; nil value: not one of ours

	restart offsets.LSN // everything that committed below it has been gathered
	begin   pgoutput.Begin
	inTx    bool
	ordinal uint64           // in-scope events seen of this transaction
	resume  offsets.Position // where the last process stopped inside a transaction

	batch outbox.Batch
	bytes int
	dirty bool // batch says something that was not handed over yet

	armed      bool // the short read deadline is set
	deadline   time.Time
	lastByte   time.Time
	caughtUp   time.Time // when the server last had nothing more to send, as we saw it
	lastStatus time.Time
	reported   offsets.LSN
	replyDue   bool

	// A server in its shutdown asks for a reply again and again, at a position
	// that is not acknowledged yet: since askedSince, last at askedLast.
	askedAt    offsets.LSN
	askedSince time.Time
	askedLast  time.Time
}

func newReader(pos offsets.Position, tables map[uint32]Table) reader {
	return reader{tables: tables, relations: map[uint32]*outbox.Mapping{}, restart: pos.LSN, reported: pos.LSN, resume: pos}
}

// full reports whether the batch must go before another event comes in.
func (r *reader) full() bool {
	return len(r.batch.Events) >= outbox.MaxBatchEvents || r.bytes >= outbox.MaxBatchBytes
}

// behind reports whether there has been more to read for so long that a server
// in its shutdown should not wait for us. It goes by our own clock: a commit time
// tells nothing about a long transaction, whose first row is sent at once, and a
// sending time nothing about full sockets.
func (r *reader) behind(now time.Time) bool { return now.Sub(r.caughtUp) > stopPatience }

func (r *reader) reset() {
	r.batch, r.bytes, r.dirty = outbox.Batch{}, 0, false
}

// progress makes the batch stand for everything below lsn.
func (r *reader) progress(lsn offsets.LSN) {
	if lsn <= r.restart {
		return
	}
	r.restart = lsn
	r.batch.Through = r.at(lsn)
	r.dirty = true
}

// at is the position of lsn, outside a transaction. Before the transaction in
// which the last process stopped has come again, its progress still counts: a
// keepalive on the way there must not make us forget it.
func (r *reader) at(lsn offsets.LSN) offsets.Position {
	if r.resume.Done > 0 && lsn <= r.resume.Tx {
		p := r.resume
		p.LSN = lsn
		return p
	}
	return offsets.Position{LSN: lsn}
}

// receive reads and handles one message. A timeout is pgconn.Timeout and leaves
// the connection usable.
func (s *Stream) receive() error {
	if err := s.arm(); err != nil {
		return fmt.Errorf("read from PostgreSQL: %w", err)
	}
	// The background context: any other costs a goroutine hand-over per message
	// and, cancelled, would also break a write.
	msg, err := s.pg.ReceiveMessage(context.Background())
	if err != nil {
		if pgconn.Timeout(err) {
			s.deadline = time.Time{}
			return err
		}
		return fmt.Errorf("read from PostgreSQL: %w", err)
	}
	switch m := msg.(type) {
	case *pgproto3.CopyData:
		s.lastByte = time.Now()
		return s.copyData(m.Data)
	case *pgproto3.ErrorResponse:
		return s.serverError(pgconn.ErrorResponseToPgError(m))
	case *pgproto3.CopyDone, *pgproto3.CommandComplete, *pgproto3.ReadyForQuery:
		// "COPY 0" is how an orderly shutdown says goodbye.
		return fmt.Errorf("read from PostgreSQL: the server ended the stream: %w", ErrServerStopping)
	default:
		return nil // notices and parameter changes
	}
}

// arm sets the read deadline: short while a batch waits to be handed over.
// Deadlines are set only when they change; a message that is buffered already
// does not look at them.
func (s *Stream) arm() error {
	now := time.Now()
	switch {
	case s.dirty && !s.armed:
		s.deadline, s.armed = now.Add(gatherFor), true
	case s.dirty && !s.deadline.IsZero():
		return nil
	case s.dirty:
		s.deadline = now.Add(gatherFor)
	case s.deadline.Sub(now) > readTick/2:
		return nil
	default:
		s.deadline = now.Add(readTick)
	}
	err := s.pg.Conn().SetReadDeadline(s.deadline)
	if s.stopping() {
		// Close may have set its deadline just before ours replaced it.
		return s.pg.Conn().SetReadDeadline(now)
	}
	return err
}

// serverError is what the server says in the middle of a stream. A slot can be
// invalidated while it is read.
func (s *Stream) serverError(err error) error {
	switch sqlState(err) {
	case "55000": // object_not_in_prerequisite_state
		return refuse(SlotLost, recoverHint, "read from PostgreSQL: %v", err)
	case "22021": // character_not_in_repertoire: the database's encoding is SQL_ASCII
		return refuse(Setup, "correct the row and start over; a database with a real encoding would not have taken it",
			"a row behind %s is not valid UTF-8: %v", s.restart, err)
	default:
		return fmt.Errorf("read from PostgreSQL: %w", err)
	}
}

func (s *Stream) copyData(data []byte) error {
	if len(data) == 0 {
		return errors.New("read from PostgreSQL: empty message")
	}
	switch data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		if err != nil {
			return fmt.Errorf("read from PostgreSQL: %w", err)
		}
		return s.keepalive(offsets.LSN(k.ServerWALEnd), k.ReplyRequested)
	case pglogrepl.XLogDataByteID:
		x, err := pglogrepl.ParseXLogData(data[1:])
		if err != nil {
			return fmt.Errorf("read from PostgreSQL: %w", err)
		}
		m, err := pgoutput.Decode(x.WALData)
		if err == nil {
			err = s.handle(m)
		}
		var refusal *Refusal
		var mismatch *ResumeMismatchError
		if err != nil && !errors.As(err, &refusal) && !errors.As(err, &mismatch) {
			return fmt.Errorf("read from PostgreSQL at %s: %w", offsets.LSN(x.WALStart), err)
		}
		return err
	default:
		return fmt.Errorf("read from PostgreSQL: unknown message %q", data[0])
	}
}

// keepalive takes the server's word that everything below walEnd was sent. It
// is queued behind the rows that it covers, so outside a transaction it is
// progress once those rows are done.
func (s *Stream) keepalive(walEnd offsets.LSN, reply bool) error {
	if !s.inTx {
		s.caughtUp = time.Now()
		s.advanceReceived(walEnd)
		s.progress(walEnd)
	}
	if !reply {
		return nil
	}
	s.replyDue = true
	now := time.Now()
	// One that asks now and then, as after a pause of ours, does not stop.
	insists := s.askedAt == walEnd && now.Sub(s.askedLast) < time.Second
	s.askedAt, s.askedLast = walEnd, now
	switch {
	case offsets.LSN(s.acked.Load()) >= walEnd:
	case !insists:
		s.askedSince = now
		if !s.inTx {
			// Once more if need be: the receiver may have been told of this position
			// when nothing was urgent.
			s.batch.Through, s.batch.Urgent, s.dirty = s.at(s.restart), true, true
		}
	case now.Sub(s.askedSince) >= stopPatience:
		return ErrServerStopping
	}
	return nil
}

func (s *Stream) advanceReceived(lsn offsets.LSN) {
	if uint64(lsn) > s.received.Load() {
		s.received.Store(uint64(lsn))
	}
}

func (s *Stream) handle(m pgoutput.Message) error {
	switch m := m.(type) {
	case pgoutput.Begin:
		s.begin, s.inTx, s.ordinal = m, true, 0
		if s.resume.Done > 0 && offsets.LSN(m.FinalLSN) > s.resume.Tx {
			// Transactions come in the order of their commits.
			return refuse(Gap, recoverHint, "the saved position is inside the transaction that commits at %s, which the log does not have", s.resume.Tx)
		}
	case pgoutput.Commit:
		return s.commit(m)
	case pgoutput.Relation:
		return s.relation(m)
	case pgoutput.Insert:
		return s.insert(m)
	case pgoutput.Ignored:
		switch m.Type {
		case 'U', 'D', 'T':
			s.ignored.Add(1)
		}
	}
	return nil
}

func (s *Stream) commit(m pgoutput.Commit) error {
	if s.resuming() {
		if s.ordinal < s.resume.Done {
			return &ResumeMismatchError{Saved: s.resume, At: s.ordinal}
		}
		s.resume = offsets.Position{}
	}
	s.inTx = false
	end := offsets.LSN(m.EndLSN)
	s.advanceReceived(end)
	s.progress(end)
	if len(s.batch.Events) > 0 {
		s.tryHandOver()
	}
	return nil
}

// relation rebuilds the mapping: the table may have changed. A table is known by
// its OID: the log has the name that it had at the time, and renaming it must not
// make its rows strangers.
func (s *Stream) relation(m pgoutput.Relation) error {
	s.relations[m.ID] = nil
	t, ours := s.tables[m.ID]
	if !ours {
		for id, t := range s.tables {
			schema, name, err := outbox.ParseTable(t.Name)
			if err == nil && schema == m.Schema && name == m.Name {
				return refuse(Gap, recoverHint, "table %s was made anew (OID %d, was %d): rows may have passed unseen", t.Name, m.ID, id)
			}
		}
		return nil
	}
	cols := make([]outbox.Column, len(m.Columns))
	for i, c := range m.Columns {
		cols[i] = outbox.Column{Name: c.Name, Type: c.Type}
	}
	mapping, err := outbox.Bind(t.Name, cols, t.Columns)
	if err != nil {
		return s.unreadable(err)
	}
	s.relations[m.ID] = mapping
	return nil
}

// unreadable hands on what came before, which is good, and refuses the rest.
func (s *Stream) unreadable(err error) error {
	if s.dirty {
		if err := s.handOver(); err != nil {
			return err
		}
	}
	return refuse(Setup, "give the column its old name or type back until the log behind the change is read, or map another one in source.tables",
		"the log holds rows that cannot be read: %v", err)
}

// resuming reports whether this is the transaction in which the last process
// stopped.
func (r *reader) resuming() bool {
	return r.resume.Done > 0 && offsets.LSN(r.begin.FinalLSN) == r.resume.Tx
}

func (s *Stream) insert(m pgoutput.Insert) error {
	mapping, known := s.relations[m.RelationID]
	if !known {
		return fmt.Errorf("row of relation %d, which was never described", m.RelationID)
	}
	if mapping == nil {
		s.ignored.Add(1)
		return nil
	}
	s.ordinal++
	e := mapping.Event(m.Values)
	row := offsets.Row{Table: e.Table, ID: e.ID}
	if s.resuming() && s.ordinal <= s.resume.Done {
		if s.ordinal == s.resume.Done && row != s.resume.Last {
			return &ResumeMismatchError{Saved: s.resume, Found: row, At: s.ordinal}
		}
		s.resumed.Add(1)
		return nil
	}
	e.Origin, e.CommittedAt = outbox.OriginWAL, s.begin.CommitTime.UTC()
	e.Position = offsets.Position{LSN: s.restart, Tx: offsets.LSN(s.begin.FinalLSN), Done: s.ordinal, Last: row}
	size := e.Size()
	if len(s.batch.Events) > 0 && s.bytes+size > outbox.MaxBatchBytes {
		if err := s.handOver(); err != nil {
			return err
		}
	}
	s.batch.Events = append(s.batch.Events, e)
	s.batch.Through, s.bytes, s.dirty = e.Position, s.bytes+size, true
	return nil
}
