package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"

	"github.com/cdcpub/cdcpub/outbox"
	"github.com/cdcpub/cdcpub/publish"
	"github.com/cdcpub/cdcpub/relay"
	"github.com/cdcpub/cdcpub/snapshot"
	"github.com/cdcpub/cdcpub/wal"
)

// The exit codes. docs/operations.md lists them.
const (
	exitUnexpected = 1
	exitUsage      = 2
	exitGap        = 3 // with --exit-on-refusal
	exitSlotLost   = 4 // with --exit-on-refusal
	exitPolicy     = 5 // with --exit-on-refusal
)

// app is what every subcommand shares, so that tests can run one in process.
type app struct {
	in      io.Reader
	out     io.Writer
	err     io.Writer
	environ []string

	configFile string // --config
}

// usageError is a wrong command line.
type usageError struct{ error }

func (a *app) root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cdcpub",
		Short: "Publish the committed rows of a PostgreSQL outbox table to RabbitMQ",
		Long: `cdcpub streams the committed inserts of a transactional-outbox table from a
logical replication slot and publishes them to RabbitMQ with publisher confirms.
A restart, a crash or a dead broker loses nothing.

Configuration comes from cdcpub.yml and from CDCPUB_* environment variables.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	cmd.SetOut(a.out)
	cmd.SetErr(a.err)
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cmd.PersistentFlags().StringVarP(&a.configFile, "config", "c", "", "configuration `FILE` (default: ./"+defaultConfigFile+" if there is one)")
	cmd.AddCommand(a.runCommand(), a.initCommand(), a.checkCommand(), a.statusCommand(), a.offsetCommand(),
		a.configCommand(), a.teardownCommand(), a.versionCommand())
	return cmd
}

// noArgs refuses arguments as a usage error.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{err}
	}
	return nil
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(a.out, "cdcpub "+version)
			return err
		},
	}
}

// exitCode is the one place that turns an error into the process's exit code.
func exitCode(err error) int {
	var config *ConfigError
	var usage usageError
	var refused *refusedError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &refused):
		return refused.exit
	case errors.As(err, &config), errors.As(err, &usage), strings.HasPrefix(err.Error(), "unknown command"):
		return exitUsage
	default:
		return exitUnexpected
	}
}

// config loads the configuration. Commands that need no broker do without its
// URL.
func (a *app) config(broker bool) (Config, error) {
	cfg, err := LoadConfig(a.configFile, a.environ)
	if err == nil && broker {
		err = cfg.requireBroker()
	}
	return cfg, err
}

func (a *app) logger(c LogConfig) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{
		Name: "cdcpub", Level: hclog.LevelFromString(c.Level), Output: a.err, JSONFormat: c.Format == "json",
		TimeFormat: "2006-01-02T15:04:05.000Z07:00", TimeFn: func() time.Time { return time.Now().UTC() },
	})
}

// confirm asks a question that takes "yes". Without a terminal it fails rather
// than wait for an answer that cannot come.
func (a *app) confirm(yes bool, question string) error {
	if yes {
		return nil
	}
	f, ok := a.in.(*os.File)
	if !ok || !isatty.IsTerminal(f.Fd()) {
		return usageError{errors.New(question + ": no terminal to ask on; add --yes to go ahead")}
	}
	fmt.Fprintf(a.err, "%s? Type yes to go ahead: ", question)
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the answer: %w", err)
	}
	if strings.TrimSpace(line) != "yes" {
		return usageError{errors.New("nothing was done")}
	}
	return nil
}

func (c ColumnsConfig) columns() outbox.Columns {
	return outbox.Columns{
		ID: c.ID, AggregateType: c.AggregateType, AggregateID: c.AggregateID, Type: c.Type, Payload: c.Payload,
		Version: c.Version, SchemaVersion: c.SchemaVersion, Kind: c.Kind, OccurredAt: c.OccurredAt, Tenant: c.Tenant,
		Headers: c.Headers, TraceParent: c.TraceParent, TraceState: c.TraceState, Extra: c.Extra,
	}
}

// qualified is the table's name as schema.name, the form in which it appears in
// events, positions and status.
func (t TableConfig) qualified() string {
	schema, name, err := outbox.ParseTable(t.Name)
	if err != nil {
		return t.Name // refused by Validate
	}
	q := schema + "." + name
	if s, n, err := outbox.ParseTable(q); err == nil && s == schema && n == name {
		return q
	}
	return outbox.QuoteTable(schema, name)
}

// walConfig holds no connection string: connections come from sourceDSN, which may
// say something else the next time.
func (c Config) walConfig() wal.Config {
	w := wal.Config{Renew: c.sourceDSN, Slot: c.Source.Slot, Publication: c.Source.Publication}
	for _, t := range c.Source.Tables {
		w.Tables = append(w.Tables, wal.Table{Name: t.qualified(), Columns: t.Columns.columns()})
	}
	return w
}

func (c Config) snapshotConfig() snapshot.Config {
	s := snapshot.Config{ChunkRows: c.Snapshot.ChunkRows}
	for _, t := range c.Source.Tables {
		s.Tables = append(s.Tables, snapshot.Table{Name: t.qualified(), Columns: t.Columns.columns(), OrderBy: c.Snapshot.OrderBy})
	}
	return s
}

func (c Config) relayConfig(log hclog.Logger) relay.Config {
	return relay.Config{
		Window: c.Relay.Window, WindowBytes: int64(c.Relay.WindowBytes), Span: c.Relay.Span,
		Strict: c.Relay.Ordering == "strict", OnUnroutable: relay.Policy(c.Relay.OnUnroutable), OnNack: relay.Policy(c.Relay.OnNack),
		Interval: c.Offsets.Interval, Every: c.Offsets.Every, ShutdownTimeout: c.Relay.ShutdownTimeout, Logger: log,
	}
}

func (c Config) publishConfig(log hclog.Logger) publish.Config {
	p := c.Publish
	return publish.Config{
		Renew: c.brokerURLs, Lanes: p.Lanes, Mandatory: p.Mandatory, Declare: p.Declare, ConfirmTimeout: p.ConfirmTimeout,
		MaxMessageBytes: int(p.MaxMessageBytes), Window: c.Relay.Window, Name: "cdcpub " + c.Source.Slot, Logger: log,
	}
}

// requireBroker reports a missing broker URL, which only run needs.
func (c *Config) requireBroker() error {
	if len(c.Publish.URLs) > 0 || c.Publish.URLsFile != "" {
		return nil
	}
	return &ConfigError{Problems: []Problem{{Key: "publish.urls", Text: "is not set: set it in the file or one broker as " + envBrokerURL}}}
}
