package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
)

// level is how good or bad a finding is.
type level string

const (
	levelOK      level = "ok"
	levelWarn    level = "warn"    // works, but should be known
	levelFail    level = "fail"    // run would not get an event through
	levelUnknown level = "unknown" // could not be found out
)

// finding is one line of check.
type finding struct {
	Name  string   `json:"check"`
	Level level    `json:"level"`
	Text  string   `json:"text"`
	Fix   []string `json:"fix,omitempty"`  // shell commands that mend it, in order
	As    string   `json:"as,omitempty"`   // who may run them
	Note  string   `json:"note,omitempty"` // what no command can do
}

// checkFailedError ends check after it has printed what is wrong.
type checkFailedError struct{ failed, all int }

func (e checkFailedError) Error() string {
	return fmt.Sprintf("%d of %d checks failed", e.failed, e.all)
}

func (a *app) checkCommand() *cobra.Command {
	var output, management string
	cmd := &cobra.Command{
		Use: "check", Short: "Look for everything that would keep run from working, and say how to mend it", Args: noArgs,
		Long: `Ask PostgreSQL, the saved state and RabbitMQ everything that run depends on and
print one line each, with the command that mends what is wrong. Nothing is
changed and nothing is published. The exit code is 1 if something is wrong.

AMQP has no question for the bindings of an exchange. With --management, check
asks RabbitMQ's management plugin for them, as the user of the broker's URL.`,
		Example: `  cdcpub check
  cdcpub check --management http://localhost:15672 --output json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			cfg, err := a.config(false)
			if err != nil {
				return err
			}
			if _, err := cfg.router(); err != nil {
				return usageError{err}
			}
			findings := a.check(cmd.Context(), cfg, management)
			a.withConfig(findings)
			if output == "json" {
				err = printJSON(a.out, findings)
			} else {
				printFindings(a.out, findings)
			}
			return errors.Join(err, failedChecks(findings))
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.Flags().StringVar(&management, "management", "", "`URL` of RabbitMQ's management plugin, to see bindings")
	return cmd
}

func (a *app) check(ctx context.Context, cfg Config, management string) []finding {
	findings, destinations := a.checkSource(ctx, cfg)
	return append(findings, a.checkBroker(ctx, cfg, destinations, management)...)
}

// withConfig has the printed commands read the file that check has read.
func (a *app) withConfig(findings []finding) {
	if a.configFile == "" {
		return
	}
	command := regexp.MustCompile(`(^|&& |' )cdcpub `)
	with := "${1}cdcpub --config " + strings.ReplaceAll(shellQuote(a.configFile), "$", "$$") + " "
	for i := range findings {
		for j, c := range findings[i].Fix {
			findings[i].Fix[j] = command.ReplaceAllString(c, with)
		}
		findings[i].Note = command.ReplaceAllString(findings[i].Note, with)
	}
}

func failedChecks(findings []finding) error {
	e := checkFailedError{all: len(findings)}
	for _, f := range findings {
		if f.Level == levelFail {
			e.failed++
		}
	}
	if e.failed == 0 {
		return nil
	}
	return e
}

// checkOutput refuses an --output that no command has.
func checkOutput(output string) error {
	if output != "text" && output != "json" {
		return usageError{fmt.Errorf("--output %q: want text or json", output)}
	}
	return nil
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false) // commands hold & and >
	return enc.Encode(v)
}

// printFindings has one line for each finding, and below it what mends it: the
// commands alone on their lines, so that they can be copied.
func printFindings(w io.Writer, findings []finding) {
	// pgx puts each address that it tried on a line of its own.
	oneLine := strings.NewReplacer(":\n\t", ": ", "\n\t", "; ")
	width := 0
	for _, f := range findings {
		width = max(width, len(f.Name))
	}
	for _, f := range findings {
		fmt.Fprintf(w, "%-7s %-*s  %s\n", f.Level, width, f.Name, oneLine.Replace(f.Text))
		if len(f.Fix) > 0 {
			who := ""
			if f.As != "" {
				who = ", as " + f.As
			}
			fmt.Fprintf(w, "        to mend it%s:\n", who)
		}
		for _, command := range f.Fix {
			fmt.Fprintf(w, "            %s\n", command)
		}
		if f.Note != "" {
			fmt.Fprintf(w, "        %s\n", f.Note)
		}
	}
}

// shellQuote makes one word of a POSIX shell of s.
func shellQuote(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./:@%+=,", r)
	}
	if s != "" && strings.TrimFunc(s, plain) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
