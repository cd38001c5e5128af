package publish

import (
	"context"
	"fmt"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/router"
)

// BenchmarkPublish measures one message from Publish to its outcome, with a
// full window, ten lanes and ten queues on a real broker. For ten lanes of
// 20,000 messages: -benchtime 200000x.
func BenchmarkPublish(b *testing.B) {
	for name, args := range map[string]amqp.Table{"classic": nil, "quorum": quorum} {
		b.Run(name, func(b *testing.B) {
			const lanes = 10
			url, exchange := rabbittest.URL(b), rabbittest.Name(b)
			keys := make([]string, lanes)
			for i := range keys {
				keys[i] = fmt.Sprint("k", i)
				rabbittest.Queue(b, url, fmt.Sprint(exchange, i), exchange, keys[i], args)
			}
			p, err := New(Config{URLs: []string{url}, Mandatory: true, Lanes: lanes, Window: 4096})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = p.Close(context.Background()) })
			body := make([]byte, 300)
			unsettled := 0
			receive := func() {
				for _, o := range <-p.Outcomes() {
					if o.Kind != router.Confirmed {
						b.Fatalf("message %d: %v", o.Seq, o.Err)
					}
					unsettled--
				}
			}
			b.ResetTimer()
			for i := range b.N {
				for unsettled >= 4096 {
					receive()
				}
				p.Publish(uint64(i), router.Message{
					Exchange: exchange, RoutingKey: keys[i%lanes], ID: fmt.Sprint(i), OrderKey: fmt.Sprint(i % 1000), Body: body,
					Headers: map[string]any{"aggregate_type": "order", "aggregate_id": keys[i%lanes], "aggregate_version": int64(i)},
				})
				unsettled++
			}
			for unsettled > 0 {
				receive()
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}
