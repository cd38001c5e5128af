// Package outbox knows the outbox table: what a row means (Event, Batch), which
// column is what (Columns, Bind, Mapping), how names are written in SQL
// (ParseTable, QuoteTable, QuoteIdentifier) and which table is recommended (DDL).
//
// Values arrive and stay in PostgreSQL's text form. Nothing here parses a
// payload: a JSON document that is decoded and encoded again comes out with
// other numbers (12345678901234567890 does not fit a float64), and the bytes
// are the application's.
//
// A table that does not fit is refused once, by Bind. A row that does not fit
// is still an Event, with the reason in Malformed: the reader must not decide
// whether a bad row stops the stream, waits for a person or is passed by.
package outbox
