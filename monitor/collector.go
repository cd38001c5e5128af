package monitor

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// collector turns one Status into metrics. It keeps nothing between scrapes:
// the stages' own counters are the truth, and a copy of them could disagree
// with /api/status.
type collector struct {
	status     func() Status
	plain      []plainMetric
	buildInfo  *prometheus.Desc
	outcomes   *prometheus.Desc
	position   *prometheus.Desc
	unfinished *prometheus.Desc
	confirm    *prometheus.Desc
}

// plainMetric is one number without labels.
type plainMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*Status) float64
}

func newCollector(status func() Status) *collector {
	return &collector{
		status: status,
		plain:  append(counters(), gauges()...),
		buildInfo: prometheus.NewDesc("cdcpub_build_info",
			"Always 1; the label is the version of the program.", []string{"version"}, nil),
		outcomes: prometheus.NewDesc("cdcpub_outcomes_total",
			"Outcomes of messages, by kind: confirmed, returned or nacked by the broker, or refused before sending. "+
				"A message that is tried again counts again.", []string{"kind"}, nil),
		position: prometheus.NewDesc("cdcpub_position_bytes",
			"Position in the write-ahead log, in bytes since its beginning; "+
				"the distance between two stages is what lies between them. Absent while unknown.", []string{"stage"}, nil),
		unfinished: prometheus.NewDesc("cdcpub_oldest_unfinished_seconds",
			"Age of the oldest event that the stage has taken and not finished; 0 if there is none.", []string{"stage"}, nil),
		confirm: prometheus.NewDesc("cdcpub_confirm_seconds",
			"Time from sending a message to its confirm; of one sent again, from the last time.", nil, nil),
	}
}

func counters() []plainMetric {
	counter := func(name, help string, value func(*Status) uint64) plainMetric {
		return plainMetric{prometheus.NewDesc("cdcpub_"+name, help, nil, nil), prometheus.CounterValue,
			func(s *Status) float64 { return float64(value(s)) }}
	}
	return []plainMetric{
		counter("events_read_total", "Events read from the source.",
			func(s *Status) uint64 { return s.Counters.EventsRead }),
		counter("events_confirmed_total", "Events that the broker has confirmed and not returned.",
			func(s *Status) uint64 { return s.Counters.Confirmed }),
		counter("events_retried_total", "Messages given to the publisher again after a return or a nack.",
			func(s *Status) uint64 { return s.Counters.Retried }),
		counter("messages_resent_total", "Messages sent again because their channel or connection was lost before an outcome.",
			func(s *Status) uint64 { return s.Counters.Resent }),
		counter("events_suppressed_total", "Events that arrived again after a restart and had been published before it.",
			func(s *Status) uint64 { return s.Counters.Suppressed }),
		counter("changes_ignored_total", "Updates, deletes, truncates and rows of other tables seen in the publication; they are no events.",
			func(s *Status) uint64 { return s.Counters.Ignored }),
		counter("publisher_reconnects_total", "Connections to the broker that were lost, each to be made again.",
			func(s *Status) uint64 { return s.Publisher.Reconnects }),
		counter("checkpoint_saves_total", "Checkpoints saved.",
			func(s *Status) uint64 { return s.Counters.CheckpointSaves }),
		counter("checkpoint_failures_total", "Attempts to save a checkpoint that failed; publishing stops until one succeeds.",
			func(s *Status) uint64 { return s.Counters.CheckpointFailures }),
	}
}

func gauges() []plainMetric {
	gauge := func(name, help string, value func(*Status) float64) plainMetric {
		return plainMetric{prometheus.NewDesc("cdcpub_"+name, help, nil, nil), prometheus.GaugeValue, value}
	}
	return []plainMetric{
		gauge("ready", "1 if streaming, connected to the broker and not blocked by it, the checkpoint can be written, "+
			"and no waiting aggregates have stopped reading; else /readyz says why not.",
			func(s *Status) float64 { return boolValue(s.Ready) }),
		gauge("pending_events", "Events read and not confirmed.",
			func(s *Status) float64 { return float64(s.Relay.Pending) }),
		gauge("span_events", "Events from the oldest unfinished one to the newest read; at relay.span reading stops.",
			func(s *Status) float64 { return float64(s.Relay.Span) }),
		gauge("held_bytes", "Bytes of events held in memory; at relay.window_bytes reading stops.",
			func(s *Status) float64 { return float64(s.Relay.HeldBytes) }),
		gauge("waiting_aggregates", "Aggregates whose events wait after a return or a nack.",
			func(s *Status) float64 { return float64(s.Relay.WaitingAggregates) }),
		gauge("waiting_events", "Events of these aggregates.",
			func(s *Status) float64 { return float64(s.Relay.WaitingEvents) }),
		gauge("snapshot_rows", "Rows older than the slot that are published; 0 if this process has not read any.",
			func(s *Status) float64 {
				if s.Snapshot == nil {
					return 0
				}
				return float64(s.Snapshot.Rows)
			}),
		gauge("snapshot_estimated_rows", "Rows older than the slot in all, by the planner's estimate; 0 if unknown.",
			func(s *Status) float64 {
				if s.Snapshot == nil {
					return 0
				}
				return float64(s.Snapshot.Estimated)
			}),
		gauge("publisher_connected", "1 if connected to the broker.",
			func(s *Status) float64 { return boolValue(s.Publisher.Connected) }),
		gauge("publisher_blocked", "1 while the broker blocks publishers for want of memory or disk.",
			func(s *Status) float64 { return boolValue(s.Publisher.Blocked) }),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.plain {
		ch <- m.desc
	}
	for _, d := range []*prometheus.Desc{c.buildInfo, c.outcomes, c.position, c.unfinished, c.confirm} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.status()
	for _, m := range c.plain {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(&s))
	}
	ch <- prometheus.MustNewConstMetric(c.buildInfo, prometheus.GaugeValue, 1, s.Version)
	c.collectOutcomes(ch, &s.Counters)
	c.collectPosition(ch, "received", s.Source.Received)
	for _, stage := range s.Stages {
		c.collectPosition(ch, stage.Name, stage.Position)
		if stage.OldestUnfinished != nil {
			ch <- prometheus.MustNewConstMetric(c.unfinished, prometheus.GaugeValue, *stage.OldestUnfinished, stage.Name)
		}
	}
	if s.ConfirmSeconds != nil {
		ch <- s.ConfirmSeconds.metric(c.confirm)
	}
}

func (c *collector) collectOutcomes(ch chan<- prometheus.Metric, n *Counters) {
	for _, outcome := range []struct {
		kind  string
		count uint64
	}{{"confirmed", n.Confirmed}, {"returned", n.Returned}, {"nacked", n.Nacked}, {"refused", n.Refused}} {
		ch <- prometheus.MustNewConstMetric(c.outcomes, prometheus.CounterValue, float64(outcome.count), outcome.kind)
	}
}

// collectPosition leaves an unknown position out: as a zero it would make the
// lag that an alert computes as large as the whole log.
func (c *collector) collectPosition(ch chan<- prometheus.Metric, stage string, p Position) {
	if p.LSN != 0 {
		ch <- prometheus.MustNewConstMetric(c.position, prometheus.GaugeValue, float64(p.LSN), stage)
	}
}

// metric converts h, whose counts are for each bucket, to Prometheus' form,
// where a bucket counts everything up to its bound.
func (h *Histogram) metric(desc *prometheus.Desc) prometheus.Metric {
	if len(h.Counts) != len(h.Bounds)+1 {
		return prometheus.NewInvalidMetric(desc, fmt.Errorf("histogram with %d bounds and %d counts", len(h.Bounds), len(h.Counts)))
	}
	buckets := make(map[float64]uint64, len(h.Bounds))
	var total uint64
	for i, count := range h.Counts {
		total += count
		if i < len(h.Bounds) {
			buckets[h.Bounds[i]] = total
		}
	}
	return prometheus.MustNewConstHistogram(desc, total, h.Sum, buckets)
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
