package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/wal"
)

// Validate returns what is wrong with c's values, in the order of the keys.
// Rules between keys name both values. What can only be known with a server or
// with a table's columns is not its affair. Nor is a missing broker URL, which
// most commands do without; those that are there are checked.
func (c *Config) Validate() []Problem {
	return slices.Concat(c.validateSecrets(), c.Source.validate(), c.Snapshot.validate(), c.validateLimits(), c.Publish.validate(),
		c.Offsets.validate(), c.Monitor.validate())
}

func (s *SourceConfig) validate() []Problem {
	var ps []Problem
	if !wal.ValidSlotName(s.Slot) {
		ps = append(ps, Problem{Key: "source.slot", Text: show(s.Slot) + " is not a slot name: want 1 to 63 of a-z, 0-9 and _"})
	}
	if s.Publication == "" || len(s.Publication) > 63 {
		ps = append(ps, Problem{Key: "source.publication", Text: show(s.Publication) + " is not a publication name: want 1 to 63 bytes"})
	}
	if len(s.Tables) == 0 {
		ps = append(ps, Problem{Key: "source.tables", Text: "is empty: name at least one table"})
	}
	seen := map[string]int{}
	for i, t := range s.Tables {
		key := fmt.Sprintf("source.tables[%d].name", i)
		schema, name, err := outbox.ParseTable(t.Name)
		table := outbox.QuoteTable(schema, name)
		first, twice := seen[table]
		switch {
		case t.Name == "":
			ps = append(ps, Problem{Key: key, Text: "is not set"})
		case err != nil:
			ps = append(ps, Problem{Key: key, Text: show(t.Name) +
				" is not a table name: want schema.name, with double quotes around a part that is not a plain identifier"})
		case twice:
			ps = append(ps, Problem{Key: key, Text: fmt.Sprintf("%s is source.tables[%d] already", show(t.Name), first)})
		default:
			seen[table] = i
		}
	}
	return ps
}

// validateSecrets checks what the connections are made with, and that the files
// which hold it can be read. They may hold something else later.
func (c *Config) validateSecrets() []Problem {
	var ps []Problem
	for _, pair := range []struct {
		key, fileKey string
		both         bool
	}{
		{"source.dsn", "source.dsn_file", c.Source.DSN != "" && c.Source.DSNFile != ""},
		{"publish.urls", "publish.urls_file", len(c.Publish.URLs) > 0 && c.Publish.URLsFile != ""},
	} {
		if pair.both {
			ps = append(ps, Problem{Key: pair.fileKey, also: []string{pair.key}, Text: "is set beside " + pair.key + ": set one of the two"})
		}
	}
	if len(ps) > 0 {
		return ps
	}
	key := "source.dsn"
	if c.Source.DSNFile != "" {
		key = "source.dsn_file"
	}
	dsn, err := c.sourceDSN()
	if err != nil {
		ps = append(ps, fileProblem(err))
	} else if text := checkDSN(dsn); text != "" {
		ps = append(ps, Problem{Key: key, Text: text})
	}
	urls, err := c.brokerURLs()
	if err != nil {
		return append(ps, fileProblem(err))
	}
	for i, u := range urls {
		key := fmt.Sprintf("publish.urls[%d]", i)
		if c.Publish.URLsFile != "" {
			key = "publish.urls_file"
		}
		if text := checkBrokerURL(u); text != "" {
			ps = append(ps, Problem{Key: key, Text: text})
		}
	}
	return ps
}

// fileProblem takes the key off the front of an error of sourceDSN or brokerURLs.
func fileProblem(err error) Problem {
	key, text, _ := strings.Cut(err.Error(), ": ")
	return Problem{Key: key, Text: text}
}

// checkDSN returns what is wrong with dsn, or "". The library's text is not
// used: it masks the password where it finds one, but in a string that does not
// parse nobody knows for sure which part that is.
func checkDSN(dsn string) string {
	if dsn == "" {
		return "is not set: set it in the file or as " + envName("source.dsn") + ", or source.dsn_file"
	}
	_, err := pgconn.ParseConfig(dsn)
	u, urlErr := url.Parse(dsn)
	stray := isURLDSN(dsn) && urlErr == nil && u.User == nil && strayAt(u)
	var file *fs.PathError
	switch {
	case err == nil && !stray:
		return ""
	case errors.As(err, &file):
		return fmt.Sprintf("names a file that cannot be used: %s: %v", show(file.Path), file.Err)
	default:
		return "is not a connection string: want postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=... or key=value words, " +
			"with special characters of a password percent-encoded in the URL form or quoted in the other"
	}
}

func (s *SnapshotConfig) validate() []Problem {
	ps := atLeastOne("snapshot.chunk_rows", s.ChunkRows)
	for i, column := range s.OrderBy {
		if column == "" {
			ps = append(ps, Problem{Key: fmt.Sprintf("snapshot.order_by[%d]", i), Text: "is an empty column name"})
		}
	}
	return ps
}

// validateLimits checks the relay's limits, and the one that it shares with the
// publisher.
func (c *Config) validateLimits() []Problem {
	r := &c.Relay
	ps := atLeastOne("relay.window", r.Window)
	// Sources hand on whole batches, so a limit below one could never be kept.
	if r.Span < outbox.MaxBatchEvents {
		ps = append(ps, Problem{Key: "relay.span", Text: fmt.Sprintf("%d is less than a batch, %d events", r.Span, outbox.MaxBatchEvents)})
	}
	if r.WindowBytes < outbox.MaxBatchBytes {
		ps = append(ps, Problem{Key: "relay.window_bytes", Text: fmt.Sprintf("%s is less than a batch, %s", r.WindowBytes, ByteSize(outbox.MaxBatchBytes))})
	}
	if r.Span < r.Window {
		ps = append(ps, Problem{Key: "relay.span", also: []string{"relay.window"}, Text: fmt.Sprintf(
			"%d is less than relay.window %d: the span must hold a full window", r.Span, r.Window)})
	}
	// The relay takes a larger event alone so as not to stand still. If such an
	// event could also be published, memory would follow max_message_bytes and
	// window_bytes would promise what it does not keep.
	if r.WindowBytes < c.Publish.MaxMessageBytes {
		ps = append(ps, Problem{Key: "relay.window_bytes", also: []string{"publish.max_message_bytes"}, Text: fmt.Sprintf(
			"%s is less than publish.max_message_bytes %s: the window must hold the largest message",
			r.WindowBytes, c.Publish.MaxMessageBytes)})
	}
	return append(ps, positive("relay.shutdown_timeout", int64(r.ShutdownTimeout))...)
}

func (p *PublishConfig) validate() []Problem {
	ps := atLeastOne("publish.lanes", p.Lanes)
	ps = append(ps, positive("publish.confirm_timeout", int64(p.ConfirmTimeout))...)
	return append(ps, positive("publish.max_message_bytes", int64(p.MaxMessageBytes))...)
}

// checkBrokerURL returns what is wrong with a broker's URL, or "". As for the
// DSN, the parser's own text could quote the password.
func checkBrokerURL(s string) string {
	u, err := url.Parse(s)
	switch {
	case err != nil || strings.ContainsAny(s, " \t\r\n") || u.User == nil && strayAt(u):
		return "is not a URL: want amqp://USER:PASSWORD@HOST:PORT/VHOST, with special characters of a password percent-encoded"
	case u.Scheme != "amqp" && u.Scheme != "amqps":
		return "is not an amqp:// or amqps:// URL"
	case u.Hostname() == "":
		return "has no host"
	case u.Port() != "" && !validPort(u.Port()):
		return "has a port that is not between 1 and 65535"
	default:
		return ""
	}
}

func (o *OffsetsConfig) validate() []Problem {
	var ps []Problem
	if o.Path == "" {
		ps = append(ps, Problem{Key: "offsets.path", Text: "is not set"})
	}
	ps = append(ps, positive("offsets.interval", int64(o.Interval))...)
	return append(ps, atLeastOne("offsets.every", o.Every)...)
}

func (m *MonitorConfig) validate() []Problem {
	if m.Listen == monitorOff {
		return nil
	}
	// Port 0 is for tests: the system picks one and the log names it.
	if _, port, err := net.SplitHostPort(m.Listen); err != nil || port != "0" && !validPort(port) {
		return []Problem{{Key: "monitor.listen", Text: show(m.Listen) + " is not an address: want HOST:PORT, :PORT or off"}}
	}
	return nil
}

func validPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}

func atLeastOne(key string, n int) []Problem {
	if n >= 1 {
		return nil
	}
	return []Problem{{Key: key, Text: fmt.Sprintf("%d is less than 1", n)}}
}

func positive(key string, n int64) []Problem {
	if n > 0 {
		return nil
	}
	return []Problem{{Key: key, Text: "must be more than zero"}}
}
