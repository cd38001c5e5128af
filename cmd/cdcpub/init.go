package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/wal"
)

func (a *app) initCommand() *cobra.Command {
	var createTable, printSQL bool
	cmd := &cobra.Command{
		Use: "init", Short: "Create the publication, and the outbox table if asked", Args: noArgs,
		Long: `Create what has to be there before the first run: the publication and, with
--create-table, the outbox table. What exists is left as it is, so init may be
run again. The replication slot is never created here: run does that, because
the rows before it belong to it.`,
		Example: `  cdcpub init --create-table
  cdcpub init --print-sql | psql ...    # for whoever may do it`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.config(false)
			if err != nil {
				return err
			}
			if printSQL {
				return a.printSQL(cfg, createTable)
			}
			return a.init(cmd.Context(), cfg, createTable)
		},
	}
	cmd.Flags().BoolVar(&createTable, "create-table", false, "create the outbox table if it does not exist")
	cmd.Flags().BoolVar(&printSQL, "print-sql", false, "print the statements instead of running them")
	return cmd
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
	conn, err := wal.Connect(ctx, cfg.walConfig())
	if err != nil {
		return err
	}
	defer conn.Close()
	found, err := conn.Inspect(ctx)
	if err != nil {
		return err
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
	if found.Publication != nil {
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
