package rabbittest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

// serverVariable names the server that tests share.
const serverVariable = "CDCPUB_TEST_RABBITMQ"

// Main is for TestMain: it runs the tests of m with a shared server, then fails
// them if they left goroutines behind. It returns the exit code.
func Main(m testproc.Runner) int { return testproc.RunWithoutLeaks(Wrap(m)) }

// Wrap returns m with a shared server around it: the one that CDCPUB_TEST_RABBITMQ
// names, or one that lives as long as m runs. It is for test processes that need
// several kinds of servers, where only the outermost looks for leaks.
func Wrap(m testproc.Runner) testproc.Runner {
	return testproc.RunnerFunc(func() int {
		if os.Getenv(serverVariable) != "" {
			return m.Run()
		}
		code, err := runWithServer(m)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	})
}

func runWithServer(m testproc.Runner) (int, error) {
	s, err := New(context.Background())
	if err != nil {
		return 1, err
	}
	if err := os.Setenv(serverVariable, s.URL()); err != nil {
		return 1, errors.Join(err, s.Close())
	}
	code := m.Run()
	if code != 0 {
		fmt.Fprintf(os.Stderr, "the end of RabbitMQ's log:\n%s\n", s.logTail())
	}
	return code, s.Close()
}

// URL is the shared server's.
func URL(t testing.TB) string {
	t.Helper()
	url := os.Getenv(serverVariable)
	if url == "" {
		t.Fatalf("%s is not set: TestMain must call rabbittest.Main or rabbittest.Wrap", serverVariable)
	}
	return url
}

// Channel opens a channel on a connection of its own, which is closed at the
// test's cleanup.
func Channel(t testing.TB, url string) *amqp.Channel {
	t.Helper()
	conn, err := dial(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeConn(conn) })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func dial(url string) (*amqp.Connection, error) {
	return amqp.DialConfig(url, amqp.Config{Dial: amqp.DefaultDial(10 * time.Second)})
}

// closeConn waits for a server that may be stopped for at most a second.
func closeConn(conn *amqp.Connection) { _ = conn.CloseDeadline(time.Now().Add(time.Second)) }

// Name returns a name that no other test uses, for exchanges and queues, or to
// begin their names with.
func Name(t testing.TB) string { return testproc.UniqueName(t.Name()) }

// Queue declares a durable queue with the given arguments, a durable topic
// exchange and a binding by key. If exchange is empty, the queue is reached
// through the default exchange, by its name. At cleanup the queue goes, and the
// exchange with its last queue.
func Queue(t testing.TB, url, queue, exchange, key string, args amqp.Table) {
	t.Helper()
	conn, err := dial(url)
	if err != nil {
		t.Fatal(err)
	}
	defer closeConn(conn)
	if err := declare(conn, queue, exchange, key, args); err != nil {
		t.Fatalf("declare queue %s: %v", queue, err)
	}
	t.Cleanup(func() {
		if err := remove(url, queue, exchange); err != nil {
			// The test may have stopped its own server for good.
			t.Logf("delete queue %s: %v", queue, err)
		}
	})
}

func declare(conn *amqp.Connection, queue, exchange, key string, args amqp.Table) error {
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, args); err != nil {
		return err
	}
	if exchange == "" {
		return nil
	}
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return err
	}
	return ch.QueueBind(queue, key, exchange, false, nil)
}

func remove(url, queue, exchange string) error {
	conn, err := dial(url)
	if err != nil {
		return err
	}
	defer closeConn(conn)
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if _, err := ch.QueueDelete(queue, false, false, false); err != nil || exchange == "" {
		return err
	}
	// Still in use means that another queue of the test is bound to it.
	var inUse *amqp.Error
	err = ch.ExchangeDelete(exchange, true, false)
	if errors.As(err, &inUse) && inUse.Code == amqp.PreconditionFailed {
		return nil
	}
	return err
}

// Drain takes n messages from queue, in the order in which the server delivers
// them, acknowledges them and returns them. It takes no message beyond those n.
// If they do not arrive within limit, the test fails and the last ones, up to
// 1000, go back to the queue.
func Drain(t testing.TB, url, queue string, n int, limit time.Duration) []amqp.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := dial(url)
	if err != nil {
		t.Fatal(err)
	}
	defer closeConn(conn)
	all := make([]amqp.Delivery, 0, n)
	for len(all) < n {
		const most = 1000
		part, err := take(ctx, conn, queue, min(n-len(all), most))
		all = append(all, part...)
		if err != nil {
			t.Fatalf("drain queue %s: got %d of %d messages: %v", queue, len(all), n, err)
		}
	}
	return all
}

// take consumes n messages with a prefetch of n and acknowledges them together,
// once it takes no more: each acknowledgement would make room for a message beyond
// those n, which would come back marked as redelivered.
func take(ctx context.Context, conn *amqp.Connection, queue string, n int) ([]amqp.Delivery, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	defer ch.Close()
	if err := ch.Qos(n, 0, false); err != nil {
		return nil, err
	}
	const consumer = "drain"
	deliveries, err := ch.Consume(queue, consumer, false, false, false, false, nil)
	if err != nil {
		return nil, err
	}
	got := make([]amqp.Delivery, 0, n)
	for len(got) < n {
		select {
		case d, open := <-deliveries:
			if !open {
				return got, errors.New("the server closed the channel")
			}
			got = append(got, d)
		case <-ctx.Done():
			return got, ctx.Err()
		}
	}
	if err := ch.Cancel(consumer, false); err != nil {
		return got, err
	}
	return got, ch.Ack(got[n-1].DeliveryTag, true)
}
