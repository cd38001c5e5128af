// Command orders runs the order service or the consumer of the example on its
// own, against servers that are there already; README.md says how. For all of it
// at once on private servers there is `make demo`.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/examples/orders/consumer"
	"github.com/cdcpub/cdcpub/examples/orders/service"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch {
	case len(args) == 1 && args[0] == "service":
		return place(ctx, os.Getenv("ORDERS_DSN"))
	case len(args) == 1 && args[0] == "consumer":
		return consume(ctx, os.Getenv("ORDERS_BROKER"))
	default:
		return errors.New("usage: ORDERS_DSN=postgres://... orders service, or ORDERS_BROKER=amqp://... orders consumer")
	}
}

func place(ctx context.Context, dsn string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, service.Schema); err != nil {
		return fmt.Errorf("create table: %w", err)
	}
	s := &service.Service{DB: conn}
	return s.Traffic(ctx, 300*time.Millisecond, func(e service.Event, err error) {
		if err != nil {
			fmt.Println("rolled back:", err)
			return
		}
		fmt.Printf("committed order %d v%d %s\n", e.OrderID, e.Version, e.Type)
	})
}

func consume(ctx context.Context, url string) error {
	c, err := consumer.Open(url)
	if err != nil {
		return err
	}
	err = c.Run(ctx, func(e consumer.Event) error {
		fmt.Printf("delivered order %s v%d %s %s\n", e.OrderID, e.Version, e.Type, e.Payload)
		return nil
	})
	fmt.Printf("%d events, %d duplicates\n", c.Counts().Distinct, c.Counts().Duplicates)
	return errors.Join(err, c.Close())
}
