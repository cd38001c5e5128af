package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
)

var errNotRunning = errors.New("cdcpub is not running")

// statusReport is what the status command knows: from the running process, or
// else from the saved state.
type statusReport struct {
	Running bool                `json:"running"`
	Status  *monitor.Status     `json:"status,omitempty"`
	Saved   *offsets.Checkpoint `json:"saved,omitempty"`
}

func (a *app) statusCommand() *cobra.Command {
	var output string
	var ready bool
	cmd := &cobra.Command{
		Use: "status", Short: "Show what the connector does, how far it is and what waits", Args: noArgs,
		Long: `Ask the running connector at monitor.listen. If none answers, show the saved
position instead.

With --ready the exit code is 1 unless a connector runs and is ready, as /readyz
says it: for health checks where there is no HTTP client.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			cfg, err := a.config(false)
			if err != nil {
				return err
			}
			report, err := readStatus(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if output == "json" {
				err = printJSON(a.out, report)
			} else {
				printStatus(a.out, cfg, report)
			}
			if ready {
				err = errors.Join(err, report.notReady())
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&ready, "ready", false, "exit code 1 unless a connector runs and is ready")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// notReady is nil if a connector runs and is ready.
func (r statusReport) notReady() error {
	switch {
	case !r.Running:
		return errNotRunning
	case !r.Status.Ready:
		return fmt.Errorf("not ready: %s", r.Status.Reason)
	default:
		return nil
	}
}

func readStatus(ctx context.Context, cfg Config) (statusReport, error) {
	if cfg.Monitor.Listen != monitorOff {
		s, err := askMonitor(ctx, cfg.Monitor.Listen)
		if err == nil {
			return statusReport{Running: true, Status: s}, nil
		}
		if !errors.Is(err, errNotRunning) {
			return statusReport{}, err
		}
	}
	cp, err := filestore.Read(cfg.Offsets.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return statusReport{}, nil
	}
	if err != nil {
		return statusReport{}, err
	}
	return statusReport{Saved: &cp}, nil
}

func askMonitor(ctx context.Context, listen string) (*monitor.Status, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("read monitor.listen: %w", err)
	}
	if host == "" || host == "0.0.0.0" || host == "::" {
		host = "127.0.0.1"
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	url := "http://" + net.JoinHostPort(host, port) + "/api/status"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", url, err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, errNotRunning
	}
	defer resp.Body.Close()
	var s monitor.Status
	if err := json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&s); err != nil {
		return nil, fmt.Errorf("ask %s: that is no cdcpub: %w", url, err)
	}
	return &s, nil
}

func printStatus(w io.Writer, cfg Config, r statusReport) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	switch {
	case r.Running:
		printRunning(line, r.Status)
	case r.Saved == nil || r.Saved.Phase == "":
		line("state", "not running, and nothing is saved in %s", cfg.Offsets.Path)
	default:
		line("state", "not running")
		printCheckpoint(line, r.Saved)
	}
}

func printRunning(line func(name, format string, args ...any), s *monitor.Status) {
	ready := "ready"
	if !s.Ready {
		ready = "not ready"
	}
	line("state", "%s, %s (version %s, up %s)", s.State, ready, s.Version, time.Since(s.StartedAt).Round(time.Second))
	if s.Reason != "" {
		line("reason", "%s", s.Reason)
	}
	if s.Refusal != nil && s.Refusal.Hint != "" {
		line("to go on", "%s", s.Refusal.Hint)
	}
	line("source", "slot %s, publication %s, tables %v", s.Source.Slot, s.Source.Publication, s.Source.Tables)
	for _, st := range s.Stages {
		text := st.Position.Text
		if text == "" {
			text = "-"
		}
		if st.OldestUnfinished != nil && *st.OldestUnfinished > 0 {
			text += fmt.Sprintf("  (oldest unfinished event: %.1f s)", *st.OldestUnfinished)
		}
		line(st.Name, "%s", text)
	}
	c := s.Counters
	line("events", "%d read, %d confirmed, %d retried, %d returned, %d nacked", c.EventsRead, c.Confirmed, c.Retried, c.Returned, c.Nacked)
	line("under way", "%d pending, %d at the broker, %d aggregates wait", s.Relay.Pending, s.Publisher.InFlight, s.Relay.WaitingAggregates)
	for _, w := range s.Waiting {
		line("waits", "%s %s: event %s, %d attempts since %s: %s", w.AggregateType, w.AggregateID, w.EventID, w.Attempts,
			w.Since.UTC().Format(time.RFC3339), w.Reason)
	}
}
