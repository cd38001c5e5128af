package publish

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/cdcpub/cdcpub/internal/fakebroker"
)

// tlsFront is a dialer to b through TLS. It ends its goroutines at cleanup.
func tlsFront(t *testing.T, b *fakebroker.Broker, certificates []tls.Certificate) func(context.Context, string, string) (net.Conn, error) {
	var copies sync.WaitGroup
	t.Cleanup(copies.Wait)
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		behind, err := b.Dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		client, server := net.Pipe()
		front := tls.Server(server, &tls.Config{Certificates: certificates})
		pass := func(dst, src net.Conn) {
			_, _ = io.Copy(dst, src)
			_ = server.Close()
			_ = behind.Close()
		}
		copies.Go(func() { pass(behind, front) })
		copies.Go(func() { pass(front, behind) })
		return client, nil
	}
}

func TestAmqpsChecksTheCertificate(t *testing.T) {
	authority := httptest.NewTLSServer(nil)
	defer authority.Close()
	trusted := x509.NewCertPool()
	trusted.AddCert(authority.Certificate())
	certificates := authority.TLS.Certificates

	t.Run("a trusted one for the host", func(t *testing.T) {
		r := newRig(t, Config{
			URLs: []string{"amqps://example.com"}, TLS: &tls.Config{RootCAs: trusted},
			dial: tlsFront(t, openBroker(t), certificates),
		}, single)
		r.publish(ids("m", 100)...)
		r.settle()
		if s := r.p.Stats(); s.Confirmed != 100 {
			t.Errorf("stats %+v", s)
		}
	})
	for _, c := range []struct {
		name, url string
		cfg       *tls.Config
		want      string
	}{
		{"one that nobody vouches for", "amqps://example.com", nil, "certificate"},
		{"a trusted one for another host", "amqps://rabbit.invalid", &tls.Config{RootCAs: trusted}, "rabbit.invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Config{
				URLs: []string{c.url}, TLS: c.cfg, dial: tlsFront(t, openBroker(t), certificates),
			}, single)
			until(t, "the handshake has failed", func() bool { return r.p.Stats().LastError != "" })
			if s := r.p.Stats(); s.Connected != 0 || !strings.Contains(s.LastError, c.want) {
				t.Errorf("stats %+v, want an error about %q", s, c.want)
			}
		})
	}
}

func openBroker(t *testing.T) *fakebroker.Broker {
	b := fakebroker.New(fakebroker.Script{})
	t.Cleanup(b.Close)
	return b
}
