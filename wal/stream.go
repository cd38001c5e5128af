package wal

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/outbox"
)

const (
	// statusInterval is how often the server hears from us, reading or not: well
	// below half of wal_sender_timeout, at which it would ask.
	statusInterval = 5 * time.Second
	// silenceLimit ends a connection from which nothing came while we were
	// reading, although every status asked for a reply.
	silenceLimit = 2 * senderTimeout
	// readTick is how long a read may sleep before the reader looks at its other
	// duties, such as a new acknowledgement.
	readTick = 200 * time.Millisecond
	// gatherFor is how long a batch may wait for more rows when the receiver was
	// busy at the last commit.
	gatherFor = time.Millisecond
	// stopPatience is how long a server that wants to stop is kept waiting for
	// rows that cannot be published now. Its administrator sees this wait.
	stopPatience = 2 * time.Second
)

// ErrServerStopping ends a stream whose server shuts down while rows are still
// unpublished: it would wait for us, and the rows stay in its log.
var ErrServerStopping = errors.New("the server is shutting down")

var (
	errStopped       = errors.New("stopped") // by Close
	errNoReplication = errors.New("no replication connection: it streams already, or was never opened")
)

// Stats are a stream's counters since its start.
type Stats struct {
	Received offsets.LSN // end of what the server has sent
	Events   uint64      // handed on
	Skipped  uint64      // already published before a restart inside a transaction
	Ignored  uint64      // updates, deletes, truncates and rows of other tables
}

// Stream is a running replication stream. It hands out batches in commit order;
// the receiver owns a batch and its bytes.
type Stream struct {
	pg      *pgconn.PgConn
	skipped *atomic.Bool // the server skipped the publication

	batches chan outbox.Batch
	acked   atomic.Uint64
	stop    chan struct{}
	stopped sync.Once
	done    chan struct{}
	err     error // written before done is closed

	received, events, resumed, ignored atomic.Uint64

	reader // owned by the goroutine of run
	prober // likewise
}

// Start begins streaming at pos, which must not be zero, and takes the
// connection over. It blocks until the server has agreed. A position inside a
// transaction makes the reader skip the events that are already published.
// tables are those of Plan.Source: their OIDs tell which rows are ours.
func (c *Conn) Start(ctx context.Context, pos offsets.Position, tables []offsets.Table) (*Stream, error) {
	if c.replication == nil {
		return nil, fmt.Errorf("start replication: %w", errNoReplication)
	}
	if pos.LSN.IsZero() {
		return nil, errors.New("start replication: no position")
	}
	err := pglogrepl.StartReplication(ctx, c.replication, c.cfg.Slot, pglogrepl.LSN(pos.LSN), pglogrepl.StartReplicationOptions{
		Mode:       pglogrepl.LogicalReplication,
		PluginArgs: []string{"proto_version '1'", "publication_names " + literal(outbox.QuoteIdentifier(c.cfg.Publication))},
	})
	if err != nil {
		err = c.startError(err)
		c.Close() // after an error the connection is out of step
		return nil, err
	}
	s := &Stream{
		pg: c.replication, skipped: c.skippedPublication,
		batches: make(chan outbox.Batch), stop: make(chan struct{}), done: make(chan struct{}),
	}
	s.prober = newProber(c.probeConfig(), c.cfg.parse)
	c.replication = nil
	c.Close()
	s.acked.Store(uint64(pos.LSN))
	s.received.Store(uint64(pos.LSN))
	s.reader = newReader(pos, c.cfg.byOID(tables))
	go s.run()
	return s, nil
}

// Batches is closed when the stream has ended; then Err says why.
func (s *Stream) Batches() <-chan outbox.Batch { return s.batches }

// Ack tells the reader how far everything is durable elsewhere. It never blocks;
// the server hears of it within readTick. Positions that go backwards are
// ignored: servers before the minor releases of August 2025 would follow.
func (s *Stream) Ack(lsn offsets.LSN) {
	for {
		old := s.acked.Load()
		if uint64(lsn) <= old || s.acked.CompareAndSwap(old, uint64(lsn)) {
			return
		}
	}
}

// Done is closed when the stream has ended, whoever still holds batches.
func (s *Stream) Done() <-chan struct{} { return s.done }

// Err is nil while the stream runs and after Close.
func (s *Stream) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// Close stops reading, sends the last acknowledgement and closes the
// connection. It waits for that, at most a few seconds; it may be called again.
func (s *Stream) Close() {
	s.stopped.Do(func() {
		close(s.stop)
		// Wakes a sleeping read. The error is that of a connection already closed.
		_ = s.pg.Conn().SetReadDeadline(time.Now())
	})
	<-s.done
}

// Stats may be called from any goroutine.
func (s *Stream) Stats() Stats {
	return Stats{
		Received: offsets.LSN(s.received.Load()), Events: s.events.Load(),
		Skipped: s.resumed.Load(), Ignored: s.ignored.Load(),
	}
}

// run owns the socket: it reads, hands batches on, and alone writes.
func (s *Stream) run() {
	err := s.loop()
	if errors.Is(err, errStopped) {
		// A last status that is lost costs the server a little WAL, nothing else.
		_ = s.sendStatus(time.Now(), false)
		err = nil
	}
	s.err = err
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = s.pg.Close(ctx) // says only that a connection we no longer want is gone
	s.endProbes()
	// In this order: who sees the batches end asks Err at once.
	close(s.done)
	close(s.batches)
}

func (s *Stream) loop() error {
	now := time.Now()
	s.lastByte, s.lastStatus, s.caughtUp = now, now, now
	for {
		if s.stopping() {
			return errStopped
		}
		if err := s.duties(time.Now()); err != nil {
			return err
		}
		if s.full() {
			if err := s.handOver(); err != nil {
				return err
			}
			continue
		}
		err := s.receive()
		switch {
		case err == nil:
		case !pgconn.Timeout(err):
			return err
		case s.dirty:
			if err := s.handOver(); err != nil {
				return err
			}
		default:
			s.caughtUp = time.Now()
		}
	}
}

func (s *Stream) stopping() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// duties are what must happen on time however many messages come.
func (s *Stream) duties(now time.Time) error {
	if now.Sub(s.lastByte) > silenceLimit {
		return fmt.Errorf("read from PostgreSQL: nothing came for %s", silenceLimit)
	}
	if s.skipped.Load() {
		return refuse(Gap, recoverHint, "the server skipped a missing publication: rows would pass unseen")
	}
	if err := s.watchShutdown(now, s.behind(now)); err != nil {
		return err
	}
	return s.status(now)
}

// status sends what is due: on time, on progress, on request.
func (s *Stream) status(now time.Time) error {
	since := now.Sub(s.lastStatus)
	switch {
	case since >= statusInterval:
		return s.sendStatus(now, true)
	case since < readTick:
		// A server that waits for us in its shutdown asks again the moment it is
		// answered: a million keepalives in two minutes have been seen.
		return nil
	case s.replyDue || offsets.LSN(s.acked.Load()) > s.reported:
		return s.sendStatus(now, false)
	}
	return nil
}

func (s *Stream) sendStatus(now time.Time, reply bool) error {
	flushed := offsets.LSN(s.acked.Load())
	written := max(offsets.LSN(s.received.Load()), flushed)
	msg := appendStatus(make([]byte, 0, 64), written, flushed, now, reply)
	conn := s.pg.Conn()
	if err := conn.SetWriteDeadline(now.Add(senderTimeout)); err != nil {
		return fmt.Errorf("send status to PostgreSQL: %w", err)
	}
	// CopyData framed by hand: type, length including itself, content.
	n := len(msg) + 4
	frame := append([]byte{'d', byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, msg...)
	if err := s.pg.Frontend().SendUnbufferedEncodedCopyData(frame); err != nil {
		return fmt.Errorf("send status to PostgreSQL: %w", err)
	}
	s.lastStatus, s.reported, s.replyDue = now, flushed, false
	return nil
}

// handOver offers the gathered batch until it is taken. Nothing is read
// meanwhile: that is the back-pressure on the server.
func (s *Stream) handOver() error {
	timer := time.NewTicker(readTick)
	defer timer.Stop()
	for {
		select {
		case s.batches <- s.batch:
			s.handedOver()
			// What came in while nobody read is not silence.
			s.lastByte = time.Now()
			return nil
		case <-s.stop:
			return errStopped
		case now := <-timer.C:
			if err := s.watchShutdown(now, s.behind(now)); err != nil {
				return err
			}
			if err := s.status(now); err != nil {
				return err
			}
		}
	}
}

// tryHandOver hands the batch on if the receiver is waiting; otherwise it goes
// on growing.
func (s *Stream) tryHandOver() {
	select {
	case s.batches <- s.batch:
		s.handedOver()
	default:
	}
}

func (s *Stream) handedOver() {
	s.events.Add(uint64(len(s.batch.Events)))
	s.reset()
	s.armed = false
}
