// Package pgoutput turns the bytes of PostgreSQL's pgoutput plugin, protocol
// version 1, into the few messages that an insert-only stream is made of. It
// does no I/O and keeps no state.
//
// The formats are specified in the PostgreSQL documentation, "Logical
// Replication Message Formats".
package pgoutput

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"
)

// Message is one of Begin, Commit, Relation, Insert or Ignored.
type Message interface{ message() }

// Begin starts a transaction. The server sends transactions one after another,
// never interleaved, in the order of their commit records.
type Begin struct {
	FinalLSN   uint64 // start of the commit record
	CommitTime time.Time
	XID        uint32
}

// Commit ends the transaction.
type Commit struct {
	CommitLSN uint64 // start of the commit record, as in Begin
	EndLSN    uint64 // end of the commit record: where the next read begins
}

// Relation describes a table. It comes before the first row of the table and
// again after every change of it, inside or between transactions.
type Relation struct {
	ID      uint32 // OID; of the root when published via the partition root
	Schema  string
	Name    string
	Columns []Column
}

// Column is one published column of a relation.
type Column struct {
	Name string
	Type uint32 // OID
}

// Insert is one new row.
type Insert struct {
	RelationID uint32
	// Values are in the order of the relation's columns, in text format; nil is
	// NULL. They are copies.
	Values [][]byte
}

// Ignored is a message that an insert-only outbox has no use for, by its type
// byte: 'U' update, 'D' delete, 'T' truncate, 'O' origin, 'Y' type, 'M' logical
// message.
type Ignored struct{ Type byte }

func (Begin) message()    {}
func (Commit) message()   {}
func (Relation) message() {}
func (Insert) message()   {}
func (Ignored) message()  {}

// Decode reads one message. Damaged input is an error, never a panic.
//
// The text of an error does not quote column values.
func Decode(data []byte) (m Message, err error) {
	if len(data) == 0 {
		return nil, errors.New("decode pgoutput message: empty")
	}
	// pglogrepl indexes past the end of truncated input.
	defer func() {
		if p := recover(); p != nil {
			m, err = nil, fmt.Errorf("decode pgoutput message %q of %d bytes: truncated or damaged", data[0], len(data))
		}
	}()
	switch data[0] {
	case 'U', 'D', 'T', 'O', 'Y', 'M':
		return Ignored{Type: data[0]}, nil
	}
	parsed, err := pglogrepl.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("decode pgoutput message %q: %w", data[0], err)
	}
	switch p := parsed.(type) {
	case *pglogrepl.BeginMessage:
		return Begin{FinalLSN: uint64(p.FinalLSN), CommitTime: p.CommitTime, XID: p.Xid}, nil
	case *pglogrepl.CommitMessage:
		return Commit{CommitLSN: uint64(p.CommitLSN), EndLSN: uint64(p.TransactionEndLSN)}, nil
	case *pglogrepl.RelationMessage:
		r := Relation{ID: p.RelationID, Schema: p.Namespace, Name: p.RelationName, Columns: make([]Column, len(p.Columns))}
		for i, c := range p.Columns {
			r.Columns[i] = Column{Name: c.Name, Type: c.DataType}
		}
		return r, nil
	case *pglogrepl.InsertMessage:
		return insert(p)
	default:
		return nil, fmt.Errorf("decode pgoutput message %q: not part of protocol version 1", data[0])
	}
}

func insert(p *pglogrepl.InsertMessage) (Message, error) {
	if p.Tuple == nil {
		return nil, errors.New("decode pgoutput insert: no tuple")
	}
	in := Insert{RelationID: p.RelationID, Values: make([][]byte, len(p.Tuple.Columns))}
	for i, c := range p.Tuple.Columns {
		switch c.DataType {
		case pglogrepl.TupleDataTypeNull:
		case pglogrepl.TupleDataTypeText:
			in.Values[i] = c.Data
			if c.Data == nil {
				in.Values[i] = []byte{}
			}
		default:
			// 'u', an unchanged TOASTed value, cannot occur in an insert, and 'b'
			// was not asked for: taking either for an empty value would lose data.
			return nil, fmt.Errorf("decode pgoutput insert: column %d has kind %q", i, c.DataType)
		}
	}
	return in, nil
}
