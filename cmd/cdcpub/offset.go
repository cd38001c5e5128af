package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
	"github.com/cdcpub/cdcpub/wal"
)

// offsetReport is what offset show knows.
type offsetReport struct {
	Path  string              `json:"path"`
	Saved *offsets.Checkpoint `json:"saved"` // null: nothing is saved
	// Server is what the server has; null if it could not be asked.
	Server *serverOffsets `json:"server"`
	Error  string         `json:"error,omitempty"` // why not
}

type serverOffsets struct {
	WALEnd         offsets.LSN  `json:"wal_end"`
	Slot           string       `json:"slot"`
	SlotExists     bool         `json:"slot_exists"`
	ConfirmedFlush *offsets.LSN `json:"confirmed_flush,omitempty"`
	Active         bool         `json:"active"`
	// Behind is the log in bytes that was not published when the server was asked;
	// what is saved may lag behind that by offsets.interval.
	Behind *uint64 `json:"behind_bytes,omitempty"`
}

func (a *app) offsetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "offset", Short: "Look at the saved position", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.offsetShowCommand())
	return cmd
}

func (a *app) offsetShowCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use: "show", Short: "Show the saved position beside the slot's", Args: noArgs,
		Long: `Show the position that is saved in offsets.path, what it belongs to, and what the
replication slot says. The connector may run meanwhile. Nothing is changed.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			cfg, err := a.config(false)
			if err != nil {
				return err
			}
			report, err := readOffsets(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if output == "json" {
				return printJSON(a.out, report)
			}
			printOffsets(a.out, cfg, report)
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func readOffsets(ctx context.Context, cfg Config) (offsetReport, error) {
	r := offsetReport{Path: cfg.Offsets.Path}
	cp, err := filestore.Read(cfg.Offsets.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return r, err
	case cp.Phase != "":
		r.Saved = &cp
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	// The saved position is worth seeing also while the server is away.
	if r.Server, err = askOffsets(ctx, cfg, r.Saved); err != nil {
		r.Error = err.Error()
	}
	return r, nil
}

func askOffsets(ctx context.Context, cfg Config, saved *offsets.Checkpoint) (*serverOffsets, error) {
	conn, err := wal.ConnectSQL(ctx, cfg.walConfig())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	f, err := conn.Inspect(ctx)
	if err != nil {
		return nil, err
	}
	s := &serverOffsets{WALEnd: f.WALEnd, Slot: cfg.Source.Slot, SlotExists: f.Slot != nil}
	if f.Slot != nil {
		s.ConfirmedFlush, s.Active = f.Slot.ConfirmedFlush, f.Slot.Active
	}
	if saved != nil && saved.Source.SystemID == f.Source.SystemID && f.WALEnd >= saved.Pos.LSN {
		behind := uint64(f.WALEnd - saved.Pos.LSN)
		s.Behind = &behind
	}
	return s, nil
}

func printOffsets(w io.Writer, cfg Config, r offsetReport) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	if r.Saved == nil {
		line("saved", "nothing in %s", cfg.Offsets.Path)
	} else {
		printCheckpoint(line, r.Saved)
	}
	switch s := r.Server; {
	case s == nil:
		line("server", "not asked: %s", r.Error)
	case !s.SlotExists:
		line("slot", "%s does not exist", s.Slot)
		line("server", "log ends at %s", s.WALEnd)
	default:
		confirmed, active := "no position", "not in use"
		if s.ConfirmedFlush != nil {
			confirmed = s.ConfirmedFlush.String()
		}
		if s.Active {
			active = "in use"
		}
		line("slot", "%s, confirmed up to %s, %s", s.Slot, confirmed, active)
		line("server", "log ends at %s", s.WALEnd)
	}
	if r.Server != nil && r.Server.Behind != nil {
		line("behind", "%d bytes of log", *r.Server.Behind)
	}
}

// printCheckpoint is what is saved, for status and offset show.
func printCheckpoint(line func(name, format string, args ...any), cp *offsets.Checkpoint) {
	line("saved", "%s, phase %s, epoch %d", cp.Pos, cp.Phase, cp.Epoch)
	line("source", "slot %s, publication %s, database %s, system %s, timeline %d", cp.Source.Slot, cp.Source.Publication,
		cp.Source.Database, cp.Source.SystemID, cp.Source.Timeline)
	for _, t := range cp.Source.Tables {
		line("table", "%s", t.Name)
	}
	for _, h := range cp.Holes {
		line("hole", "%s below %s since %s: %s", h.Kind, h.Below, h.Since.UTC().Format(time.RFC3339), h.Reason)
	}
}
