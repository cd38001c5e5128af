package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/monitor"
	"github.com/cdcpub/cdcpub/router"
)

func (a *app) runCommand() *cobra.Command {
	var exitOnRefusal, createPublication bool
	cmd := &cobra.Command{
		Use: "run", Short: "Publish until told to stop", Args: noArgs,
		Long: `Publish the rows of the outbox until SIGTERM or SIGINT.

The first run creates the replication slot and publishes the rows that are in
the table already; every later one goes on where the last one stopped. Where
going on would hide a loss, run refuses: it stays up, is live but not ready,
says why in its log and status, and looks again every 5 seconds. Behind an event
that a policy stops at it looks less often, or waits for a new start.`,
		Example: `  cdcpub run --config cdcpub.yml
  CDCPUB_SOURCE_DSN=postgres://... CDCPUB_PUBLISH_URL=amqp://... cdcpub run`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.config(true)
			if err != nil {
				return err
			}
			return a.run(cmd.Context(), cfg, exitOnRefusal, createPublication)
		},
	}
	cmd.Flags().BoolVar(&exitOnRefusal, "exit-on-refusal", false, "exit with a code of its own instead of staying up refused: 2 setup, 3 gap, 4 slot lost, 5 stopped by policy")
	cmd.Flags().BoolVar(&createPublication, "create-publication", false, "create the publication if there is none (init does that, too)")
	return cmd
}

func (a *app) run(ctx context.Context, cfg Config, exitOnRefusal, createPublication bool) error {
	log := a.logger(cfg.Log)
	// Found out now rather than by each attempt, behind a slot that was created.
	rt, err := cfg.compile()
	if err != nil {
		return err
	}
	c := &connector{cfg: cfg, router: rt, log: log, board: newBoard(cfg), createPublication: createPublication}
	if cfg.Monitor.Listen != monitorOff {
		stop, err := startMonitor(cfg.Monitor.Listen, c.board, log)
		if err != nil {
			return err
		}
		defer stop()
	}
	log.Info("cdcpub starts", "version", version, "slot", cfg.Source.Slot, "publication", cfg.Source.Publication)
	defer context.AfterFunc(ctx, c.board.stop)()
	if isTerminal(a.out) {
		telling, stop := context.WithCancel(ctx)
		var told sync.WaitGroup
		told.Go(func() { narrate(telling, a.out, c.board.status) })
		defer told.Wait()
		defer stop()
	}
	err = supervise(ctx, c, exitOnRefusal)
	if err == nil {
		log.Info("cdcpub has stopped")
	}
	return err
}

// compile checks what only the stages themselves can judge: templates, broker URLs.
func (c Config) compile() (*router.Router, error) {
	rt, err := c.router()
	if err == nil {
		err = c.publishConfig(hclog.NewNullLogger()).Validate()
	}
	if err != nil {
		return nil, usageError{err}
	}
	return rt, nil
}

func (c Config) router() (*router.Router, error) {
	var columns []string
	for _, t := range c.Source.Tables {
		columns = append(columns, t.Columns.Extra...)
	}
	return router.New(router.Config{
		Exchange: c.Router.Exchange, RoutingKey: c.Router.RoutingKey, MessageID: c.Router.MessageID,
		AppID: c.Router.AppID, Headers: c.Router.Headers, Columns: columns,
	})
}

func startMonitor(listen string, b *board, log hclog.Logger) (stop func(), err error) {
	srv := &monitor.Server{
		Addr: listen, Status: b.status, Live: b.live,
		ErrorLog: log.Named("monitor").StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn}),
	}
	if err := srv.Start(); err != nil {
		return nil, err
	}
	log.Info("status is served", "url", "http://"+srv.Address().String()+"/")
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			log.Debug("monitor was cut off", "error", err)
		}
	}, nil
}

// refusedError ends run with --exit-on-refusal.
type refusedError struct {
	refusal monitor.Refusal
	exit    int
}

func (e *refusedError) Error() string {
	if e.refusal.Hint == "" {
		return "refused: " + e.refusal.Text
	}
	return fmt.Sprintf("refused: %s; %s", e.refusal.Text, e.refusal.Hint)
}
