// Command cdcpub publishes the committed rows of PostgreSQL outbox tables to
// RabbitMQ. Each subcommand is one file; run is wired in connector.go and kept
// going in supervisor.go.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process at once: who sends it has waited enough.
	context.AfterFunc(ctx, stop)
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ()}
	err := a.root().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cdcpub: "+err.Error())
	}
	os.Exit(exitCode(err))
}
