package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/url"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cdcpub/cdcpub/examples/orders/consumer"
	"github.com/cdcpub/cdcpub/examples/orders/service"
)

const (
	pace = 300 * time.Millisecond // between two steps of the service
	// headStart is how long the service writes before there is a connector, so that
	// the first events come from the table and not from the log.
	headStart = time.Second
	killAfter = 8 * time.Second // or after half of a shorter demo
	downTime  = 2 * time.Second
	drainTime = 30 * time.Second
)

// demo is one run.
type demo struct {
	screen *screen
	length time.Duration           // 0: until Ctrl-C
	abort  context.CancelCauseFunc // ends everything, with the reason

	// What Traffic counts; read after it has ended.
	rolledBack int
}

// run goes on until stop ends or its time is over. ctx bounds all of it.
func (d *demo) run(ctx, stop context.Context, program, dir string) error {
	dsn, err := createDatabase(ctx, os.Getenv("CDCPUB_TEST_POSTGRES"))
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, service.Schema); err != nil {
		return fmt.Errorf("create table: %w", err)
	}
	broker := os.Getenv("CDCPUB_TEST_RABBITMQ")
	cdcpub, err := newConnector(program, dir, dsn, broker)
	if err != nil {
		return err
	}
	if err := cdcpub.init(ctx, d.screen); err != nil {
		return err
	}
	c, err := consumer.Open(broker)
	if err != nil {
		return err
	}
	got := newLedger()
	consuming := d.start(ctx, func(ctx context.Context) error { return c.Run(ctx, d.receive(got)) })
	writing := d.start(stop, func(ctx context.Context) error {
		return (&service.Service{DB: conn}).Traffic(ctx, pace, d.report)
	})
	d.screen.say("the order service starts; the connector does not run yet")
	err = d.play(ctx, stop, cdcpub)
	writing()
	if err == nil {
		err = d.drain(ctx, conn, cdcpub, got)
	}
	cdcpub.kill() // unless it has ended as it should
	consuming()
	err = errors.Join(err, c.Close())
	if ctx.Err() == nil {
		err = errors.Join(err, d.compare(ctx, conn, got, c.Counts()))
	}
	if err != nil {
		return cdcpub.explain(err)
	}
	return nil
}

// createDatabase creates the database of the demo on the server of dsn.
func createDatabase(ctx context.Context, dsn string) (string, error) {
	const name = "orders"
	u, err := url.Parse(dsn)
	if err != nil || u.Host == "" {
		return "", errors.New("CDCPUB_TEST_POSTGRES names no server: run scripts/demo")
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return "", fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return "", fmt.Errorf("create database: %w", err)
	}
	u.Path = "/" + name
	return u.String(), nil
}

// start runs f beside the rest until the returned function is called, which
// waits for its end. An error of f ends the demo.
func (d *demo) start(ctx context.Context, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			d.abort(err)
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// report shows what the service did.
func (d *demo) report(e service.Event, err error) {
	id := strconv.FormatInt(e.OrderID, 10)
	if err == nil {
		d.screen.event(committed, id, e.Version, e.Type, "")
		return
	}
	d.rolledBack++
	d.screen.event(rolledBack, id, e.Version, e.Type, "its event must never arrive")
}

// receive shows and remembers what the consumer gets.
func (d *demo) receive(got *ledger) func(consumer.Event) error {
	return func(e consumer.Event) error {
		switch {
		case e.Again:
			d.screen.event(duplicate, e.OrderID, e.Version, e.Type, "same message_id as before")
		case e.Origin == "snapshot":
			d.screen.event(delivered, e.OrderID, e.Version, e.Type, "from before the connector's first start")
		default:
			d.screen.event(delivered, e.OrderID, e.Version, e.Type, "")
		}
		got.add(e.ID)
		return nil
	}
}

// play starts the connector, kills it once and starts it again, and returns when
// stop ends or the time is over. The connector runs then.
func (d *demo) play(ctx, stop context.Context, c *connector) error {
	kill := killAfter
	if d.length > 0 {
		var end context.CancelFunc
		stop, end = context.WithTimeout(stop, d.length)
		defer end()
		kill = min(kill, d.length/2)
	}
	began := time.Now()
	if err := c.wait(stop, headStart); err != nil {
		return err
	}
	if err := c.start(ctx); err != nil {
		return err
	}
	d.screen.say("the connector runs as process %d; its status is at %s", c.pid(), c.url("/api/status"))
	if err := c.wait(stop, kill-time.Since(began)); err != nil {
		return err
	}
	if stop.Err() == nil {
		d.screen.alarm("the connector is killed (SIGKILL); the service goes on")
		c.kill()
		if err := c.wait(stop, min(downTime, kill/3)); err != nil {
			return err
		}
		if err := c.start(ctx); err != nil {
			return err
		}
		d.screen.alarm("the connector is started again, as process %d", c.pid())
	}
	return c.wait(stop, math.MaxInt64)
}

// drain waits until everything that was committed is delivered, then stops the
// connector as an orchestrator would.
func (d *demo) drain(ctx context.Context, conn *pgx.Conn, c *connector, got *ledger) error {
	d.screen.say("the service has stopped; what is under way may arrive")
	ids, err := events(ctx, conn)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	for len(got.missing(ids)) > 0 && limited.Err() == nil {
		select {
		case <-got.changed:
		case <-c.ended:
			return errEnded
		case <-limited.Done():
			d.screen.alarm("not everything has arrived within %s", drainTime)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return c.terminate(ctx)
}

// events returns the IDs in the outbox: what was committed, whatever the service
// thinks.
func events(ctx context.Context, conn *pgx.Conn) ([]string, error) {
	rows, err := conn.Query(ctx, "SELECT id::text FROM outbox")
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	return ids, nil
}

// compare prints the result. Its last line is an interface: scripts read it.
func (d *demo) compare(ctx context.Context, conn *pgx.Conn, got *ledger, counts consumer.Counts) error {
	ids, err := events(ctx, conn)
	if err != nil {
		return err
	}
	lost := len(got.missing(ids))
	phantoms := counts.Distinct - (len(ids) - lost)
	d.screen.say("%d duplicates for a consumer to drop, %d transactions rolled back, %d of their events delivered",
		counts.Duplicates, d.rolledBack, phantoms)
	d.screen.print(fmt.Sprintf("demo: committed=%d delivered=%d lost=%d", len(ids), counts.Distinct, lost))
	switch {
	case lost > 0:
		return fmt.Errorf("%d events were lost", lost)
	case phantoms > 0:
		return fmt.Errorf("%d events were delivered that were never committed", phantoms)
	case len(ids) == 0:
		return errors.New("nothing was committed")
	default:
		return nil
	}
}
