package outbox

import (
	"errors"
	"fmt"
	"strings"
)

// maxIdentifier is NAMEDATALEN-1. The server cuts a longer name with a notice,
// and the cut name is another table's.
const maxIdentifier = 63

// ParseTable reads a table's name as SQL writes it: schema.name, each part
// optionally in double quotes. Without quotes a part is folded to lower case;
// without a schema it is public, whatever the search_path says, since the
// replication connection and the application may have different ones.
func ParseTable(s string) (schema, name string, err error) {
	first, rest, err := parseIdentifier(s)
	if err == nil && rest == "" {
		return "public", first, nil
	}
	if err == nil && rest[0] != '.' {
		err = fmt.Errorf("unexpected %q", rest)
	}
	if err == nil {
		name, rest, err = parseIdentifier(rest[1:])
	}
	if err == nil && rest != "" {
		err = fmt.Errorf("unexpected %q", rest)
	}
	if err != nil {
		return "", "", fmt.Errorf("parse table name %q: %w", s, err)
	}
	return first, name, nil
}

// parseIdentifier reads one identifier from the front of s.
func parseIdentifier(s string) (ident, rest string, err error) {
	if strings.HasPrefix(s, `"`) {
		ident, rest, err = parseQuoted(s[1:])
	} else {
		ident, rest = parseBare(s)
	}
	switch {
	case err != nil:
		return "", "", err
	case ident == "":
		return "", "", errors.New("want schema.name, with double quotes around a part that is not a plain identifier")
	case len(ident) > maxIdentifier:
		return "", "", fmt.Errorf("%q is longer than %d bytes", ident, maxIdentifier)
	case strings.ContainsRune(ident, 0):
		return "", "", errors.New("an identifier cannot hold a NUL byte")
	}
	return ident, rest, nil
}

func parseQuoted(s string) (ident, rest string, err error) {
	var b strings.Builder
	for {
		part, after, ok := strings.Cut(s, `"`)
		if !ok {
			return "", "", errors.New("missing closing double quote")
		}
		b.WriteString(part)
		if !strings.HasPrefix(after, `"`) {
			return b.String(), after, nil
		}
		b.WriteByte('"') // two quotes stand for one
		s = after[1:]
	}
}

// parseBare folds ASCII letters only, as a server with a UTF-8 database does.
func parseBare(s string) (ident, rest string) {
	n := 0
	for n < len(s) && isIdentifierByte(s[n], n == 0) {
		n++
	}
	lower := []byte(s[:n])
	for i, c := range lower {
		if c >= 'A' && c <= 'Z' {
			lower[i] = c + ('a' - 'A')
		}
	}
	return string(lower), s[n:]
}

func isIdentifierByte(c byte, first bool) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c == '_', c >= 0x80:
		return true
	default:
		return !first && (c >= '0' && c <= '9' || c == '$')
	}
}

// QuoteTable writes a table's name for use in SQL, safe for any schema and name.
func QuoteTable(schema, name string) string {
	return QuoteIdentifier(schema) + "." + QuoteIdentifier(name)
}

// QuoteIdentifier writes a single name for use in SQL.
func QuoteIdentifier(s string) string {
	return `"` + strings.ReplaceAll(s, `"`, `""`) + `"`
}

// DDL returns the recommended outbox table as one SQL statement: Debezium's
// five columns, so that the table serves either, and the optional ones that
// Bind maps by themselves.
func DDL(schema, name string) string {
	return "CREATE TABLE IF NOT EXISTS " + QuoteTable(schema, name) + ddlBody
}

const ddlBody = ` (
    -- The event's identity: message_id of the message, by which a consumer
    -- recognises what it has seen.
    id uuid PRIMARY KEY,

    -- The business object that the event is about. Order is kept per aggregate.
    -- The connector refuses an empty value; here the application hears of it first.
    aggregatetype varchar(255) NOT NULL CHECK (aggregatetype <> ''),
    aggregateid varchar(255) NOT NULL CHECK (aggregateid <> ''),

    -- What happened, such as OrderPaid.
    type varchar(255) NOT NULL,

    -- The message body, sent as stored. jsonb normalises white space, key order and
    -- duplicate keys on the way in; where the exact bytes count, make it json, text or bytea.
    payload jsonb,

    -- The aggregate's version after the event, raised by one in the transaction
    -- that changes it. Consumers see a missing event as a gap.
    version bigint NOT NULL,

    -- The version of the payload's schema.
    schema_version integer NOT NULL DEFAULT 1,

    -- What the payload is to a consumer that missed earlier events: a change, the
    -- whole state, or the end of the aggregate. NULL leaves it unsaid.
    kind text CHECK (kind IN ('delta', 'snapshot', 'tombstone')),

    -- The application's clock, for people and monitoring. Never an order.
    occurred_at timestamptz NOT NULL DEFAULT now(),

    -- Part of the aggregate's identity; empty where there is one tenant.
    tenant text NOT NULL DEFAULT '',

    -- Further message headers: a JSON object of strings, numbers and booleans.
    headers jsonb CHECK (jsonb_typeof(headers) = 'object'),

    -- W3C trace context of the request that caused the event.
    traceparent text,

    -- Two transactions that read the same version and both write the next one have
    -- lost an update: the second fails here instead of being published. It is also
    -- what lets the snapshot order old rows by version: within an aggregate no two
    -- rows are equal, and the order is that of their commits.
    UNIQUE (tenant, aggregatetype, aggregateid, version)
)`
