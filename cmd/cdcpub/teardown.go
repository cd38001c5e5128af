package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/offsets/filestore"
	"github.com/cdcpub/cdcpub/wal"
)

func (a *app) teardownCommand() *cobra.Command {
	var yes, withoutState bool
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
			return a.teardown(cmd.Context(), cfg, withoutState)
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&withoutState, "without-state", false, "do it although the saved state is lost, damaged or of another server")
	return cmd
}

func (a *app) teardown(ctx context.Context, cfg Config, withoutState bool) error {
	// The lock first: a running connector would make the slot's state anew.
	store, err := filestore.Open(cfg.Offsets.Path)
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }() // Remove has closed it already
	conn, err := wal.Connect(ctx, cfg.walConfig())
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := ours(ctx, store, conn, withoutState); err != nil {
		return err
	}
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
			return err
		}
		fmt.Fprintf(a.out, "%s: gone\n", step.what)
	}
	return nil
}

// ours refuses to touch what belongs to another connector: two services with the
// default names are one typing error apart.
func ours(ctx context.Context, store *filestore.Store, conn *wal.Conn, withoutState bool) error {
	found, err := conn.Inspect(ctx)
	if err != nil {
		return err
	}
	if found.Slot != nil && found.Slot.Active {
		return fmt.Errorf("replication slot %s is in use by PostgreSQL process %d: stop its connector first", found.Source.Slot, found.Slot.ActivePID)
	}
	if withoutState {
		return nil
	}
	cp, err := store.Acquire(ctx)
	if err != nil {
		return err
	}
	if cp.Phase == "" {
		if found.Slot == nil {
			return nil
		}
		return fmt.Errorf("replication slot %s exists, but nothing is saved here that says whose it is: nothing was dropped; add --without-state if it is this connector's", found.Source.Slot)
	}
	s, f := cp.Source, found.Source
	if s.SystemID != f.SystemID || s.Database != f.Database || s.Slot != f.Slot || s.Publication != f.Publication {
		return fmt.Errorf("the saved state belongs to slot %s, publication %s and database %s of system %s, not to slot %s, publication %s and database %s of system %s: nothing was dropped; add --without-state to drop them all the same",
			s.Slot, s.Publication, s.Database, s.SystemID, f.Slot, f.Publication, f.Database, f.SystemID)
	}
	return nil
}
