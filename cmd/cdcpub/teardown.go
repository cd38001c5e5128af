package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/offsets/filestore"
	"github.com/cdcpub/cdcpub/wal"
)

func (a *app) teardownCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "teardown", Short: "Drop the slot, the publication and the saved state", Args: noArgs,
		Long: `Remove what run and init have made: the replication slot, so that PostgreSQL no
longer keeps WAL for it, the publication and the saved position. The outbox
table and its rows stay. Events that were not published yet stay only as rows of
the table; a later run publishes all rows again.

The connector must not be running.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.config(false)
			if err != nil {
				return err
			}
			question := fmt.Sprintf("drop slot %s, publication %s and the state in %s", cfg.Source.Slot, cfg.Source.Publication, cfg.Offsets.Path)
			if err := a.confirm(yes, question); err != nil {
				return err
			}
			return a.teardown(cmd.Context(), cfg)
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

func (a *app) teardown(ctx context.Context, cfg Config) error {
	// The lock first: a running connector would make the slot's state anew.
	store, err := filestore.Open(cfg.Offsets.Path)
	if err != nil {
		return err
	}
	conn, err := wal.Connect(ctx, cfg.walConfig())
	if err != nil {
		_ = store.Close() // nothing was changed
		return err
	}
	defer conn.Close()
	for _, step := range []struct {
		what string
		do   func() error
	}{
		// The publication first: its owner's right is what may be missing, and a
		// slot that is gone already would leave a half-done teardown.
		{"publication " + cfg.Source.Publication, func() error { return conn.DropPublication(ctx) }},
		{"slot " + cfg.Source.Slot, func() error { return conn.DropSlot(ctx) }},
		{"state in " + cfg.Offsets.Path, store.Remove},
	} {
		if err := step.do(); err != nil {
			_ = store.Close() // the error of the step is the one that counts
			return err
		}
		fmt.Fprintf(a.out, "%s: gone\n", step.what)
	}
	return nil
}
