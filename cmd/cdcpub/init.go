package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/wal"
)

func (a *app) initCommand() *cobra.Command {
	var createTable, printSQL, broker bool
	var opts brokerOptions
	cmd := &cobra.Command{
		Use: "init", Short: "Create the publication, and the outbox table or the broker's side if asked", Args: noArgs,
		Long: `Create what has to be there before the first run: the publication and, with
--create-table, the outbox table. What exists is left as it is, so init may be
run again. The replication slot is never created here: run does that, because
the rows before it belong to it.

With --broker, create the RabbitMQ side instead: the exchanges that the rows in
the outbox go to, as durable topic exchanges, and a queue that gets everything,
for a first look; with --shards N, N queues of which each gets whole aggregates,
with a single active consumer each. docs/broker.md has the details.`,
		Example: `  cdcpub init --create-table
  cdcpub init --print-sql | psql ...    # for whoever may do it
  cdcpub init --broker --exchange outbox.event.order --shards 8`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkInitFlags(cmd, broker, opts); err != nil {
				return err
			}
			cfg, err := a.config(broker)
			switch {
			case err != nil:
				return err
			case broker:
				return a.initBroker(cmd.Context(), cfg, opts)
			case printSQL:
				return a.printSQL(cfg, createTable)
			default:
				return a.init(cmd.Context(), cfg, createTable)
			}
		},
	}
	cmd.Flags().BoolVar(&createTable, "create-table", false, "create the outbox table if it does not exist")
	cmd.Flags().BoolVar(&printSQL, "print-sql", false, "print the statements instead of running them")
	cmd.Flags().BoolVar(&broker, "broker", false, "create exchanges, queues and bindings in RabbitMQ")
	cmd.Flags().StringArrayVar(&opts.exchanges, "exchange", nil, "with --broker: `NAME` of an exchange, instead of those that the rows go to (repeatable)")
	cmd.Flags().StringVar(&opts.queue, "queue", defaultQueue, "with --broker: `NAME` of the queue, or of the queues before their number")
	cmd.Flags().IntVar(&opts.shards, "shards", 0, "with --broker: spread the aggregates over `N` queues")
	return cmd
}

func checkInitFlags(cmd *cobra.Command, broker bool, opts brokerOptions) error {
	for _, name := range []string{"exchange", "queue", "shards"} {
		if cmd.Flags().Changed(name) && !broker {
			return usageError{fmt.Errorf("--%s goes with --broker", name)}
		}
	}
	for _, name := range []string{"create-table", "print-sql"} {
		if cmd.Flags().Changed(name) && broker {
			return usageError{fmt.Errorf("--%s does not go with --broker: run init twice", name)}
		}
	}
	switch {
	case cmd.Flags().Changed("shards") && (opts.shards < 1 || opts.shards > 1024):
		return usageError{fmt.Errorf("--shards %d: want 1 to 1024", opts.shards)}
	case opts.queue == "":
		return usageError{errors.New("--queue is empty")}
	}
	return nil
}

func (a *app) printSQL(cfg Config, createTable bool) error {
	if createTable {
		for _, t := range cfg.Source.Tables {
			sql, err := tableSQL(t)
			if err != nil {
				return err
			}
			fmt.Fprintln(a.out, sql+";")
		}
	}
	sql, err := wal.PublicationSQL(cfg.walConfig())
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.out, sql+";")
	return err
}

func tableSQL(t TableConfig) (string, error) {
	schema, name, err := outbox.ParseTable(t.Name)
	if err != nil {
		return "", err
	}
	return outbox.DDL(schema, name), nil
}

func (a *app) init(ctx context.Context, cfg Config, createTable bool) error {
	// Not a replication connection: the owner of the tables, who may do this, needs
	// no REPLICATION attribute.
	conn, err := wal.ConnectSQL(ctx, cfg.walConfig())
	if err != nil {
		return err
	}
	defer conn.Close()
	found, err := conn.Inspect(ctx)
	if err != nil {
		return err
	}
	// First of all: a service that comes second with another's names must not
	// change anything.
	if r := about(wal.AboutSlot+cfg.Source.Slot, found.Problems(cfg.walConfig())); r != nil {
		return r
	}
	for i, t := range found.Tables {
		switch {
		case t.OID != 0:
			fmt.Fprintf(a.out, "table %s: exists\n", t.Name)
		case createTable:
			sql, err := tableSQL(cfg.Source.Tables[i])
			if err != nil {
				return err
			}
			if err := conn.Exec(ctx, sql); err != nil {
				return fmt.Errorf("create table %s: %w", t.Name, err)
			}
			fmt.Fprintf(a.out, "table %s: created\n", t.Name)
		default:
			return fmt.Errorf("table %s does not exist; to create it, run: cdcpub init --create-table", t.Name)
		}
	}
	if found, err = conn.Inspect(ctx); err != nil {
		return err
	}
	return a.initPublication(ctx, cfg, conn, found)
}

// about returns the first refusal about subject, or nil.
func about(subject string, refusals []*wal.Refusal) *wal.Refusal {
	for _, r := range refusals {
		if r.About == subject {
			return r
		}
	}
	return nil
}

func (a *app) initPublication(ctx context.Context, cfg Config, conn *wal.Conn, found wal.Findings) error {
	if found.Publication != nil {
		// It may be another service's, which has the same default name.
		if r := about(wal.AboutPublication+cfg.Source.Publication, found.Problems(cfg.walConfig())); r != nil {
			return r
		}
		fmt.Fprintf(a.out, "publication %s: exists\n", cfg.Source.Publication)
		return nil
	}
	if found.Slot != nil {
		// Rows that commit until now pass unseen, and PostgreSQL up to 17 cannot
		// even read on: the publication did not exist at the slot's position.
		return fmt.Errorf("publication %s does not exist, but replication slot %s does: a publication made now would not cover its rows", cfg.Source.Publication, cfg.Source.Slot)
	}
	if err := conn.CreatePublication(ctx); err != nil {
		return fmt.Errorf("%w; the owner of the tables with CREATE on the database may run: cdcpub init --print-sql", err)
	}
	fmt.Fprintf(a.out, "publication %s: created\n", cfg.Source.Publication)
	return nil
}
