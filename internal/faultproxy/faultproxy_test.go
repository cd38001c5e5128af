package faultproxy_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cdcpub/cdcpub/internal/faultproxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit ends a test that hangs; quiet is how long "nothing arrives" is watched.
const (
	limit = 10 * time.Second
	quiet = 50 * time.Millisecond
)

// echoServer sends back what it gets and ends a connection when its client does.
func echoServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

func start(t *testing.T) *faultproxy.Proxy { return faultproxy.Start(t, echoServer(t)) }

func dial(t *testing.T, p *faultproxy.Proxy) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	return conn.(*net.TCPConn)
}

// echo sends text and wants it back.
func echo(conn net.Conn, text string) error {
	if _, err := io.WriteString(conn, text); err != nil {
		return err
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if string(got) != text {
		return errors.New("got back " + string(got))
	}
	return nil
}

func TestBytesPassBothWaysAndEndsAreForwarded(t *testing.T) {
	conn := dial(t, start(t))
	sent := bytes.Repeat([]byte("0123456789"), 1<<17)
	go func() {
		_, _ = conn.Write(sent)
		_ = conn.CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("sent %d bytes, got back %d, error %v", len(sent), len(got), err)
	}
}

func TestStallHoldsBytesUntilResumeAndBlocksTheWriterInTheEnd(t *testing.T) {
	p := start(t)
	conn := dial(t, p)
	if err := echo(conn, "before"); err != nil {
		t.Fatal(err)
	}
	p.Stall()
	p.Stall()
	var sent int
	chunk := bytes.Repeat([]byte("x"), 64<<10)
	if err := conn.SetDeadline(time.Now().Add(quiet)); err != nil {
		t.Fatal(err)
	}
	var err error
	for err == nil {
		var n int
		n, err = conn.Write(chunk)
		sent += n
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("writing into a stall: %v, want a full buffer", err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(quiet)); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(chunk); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%d bytes passed a stall, error %v", n, err)
	}
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	p.Resume()
	p.Resume()
	if n, err := io.CopyN(io.Discard, conn, int64(sent)); err != nil {
		t.Fatalf("%d of %d bytes came back: %v", n, sent, err)
	}
	if err := echo(conn, "after"); err != nil {
		t.Fatal(err)
	}
}

func TestConnectionsMadeDuringAStallWorkAfterIt(t *testing.T) {
	p := start(t)
	p.Stall()
	conn := dial(t, p)
	done := make(chan error, 1)
	go func() { done <- echo(conn, "patience") }()
	select {
	case err := <-done:
		t.Fatalf("a stall let bytes pass, error %v", err)
	case <-time.After(quiet):
	}
	p.Resume()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestLostConnections(t *testing.T) {
	tests := map[string]struct {
		stalled bool
		lose    func(*faultproxy.Proxy)
		want    error
	}{
		"a cut ends them":                     {false, (*faultproxy.Proxy).Cut, io.EOF},
		"a cut ends stalled ones":             {true, (*faultproxy.Proxy).Cut, io.EOF},
		"a reset is seen as a reset":          {false, (*faultproxy.Proxy).Reset, syscall.ECONNRESET},
		"a reset of stalled ones is one, too": {true, (*faultproxy.Proxy).Reset, syscall.ECONNRESET},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := start(t)
			conn := dial(t, p)
			if err := echo(conn, "hello"); err != nil {
				t.Fatal(err)
			}
			if tt.stalled {
				p.Stall()
			}
			tt.lose(p)
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			p.Resume()
			if err := echo(dial(t, p), "hello again"); err != nil {
				t.Fatalf("a new connection: %v", err)
			}
		})
	}
}

func TestRefuseConcernsNewConnectionsOnly(t *testing.T) {
	p := start(t)
	old := dial(t, p)
	if err := echo(old, "old"); err != nil {
		t.Fatal(err)
	}
	p.Refuse()
	refused, err := net.Dial("tcp", p.Addr())
	if err == nil {
		t.Cleanup(func() { _ = refused.Close() })
		err = echo(refused, "new")
	}
	if err == nil {
		t.Fatal("a connection was accepted")
	}
	if err := echo(old, "still here"); err != nil {
		t.Fatal(err)
	}
	p.Accept()
	if err := echo(dial(t, p), "new"); err != nil {
		t.Fatal(err)
	}
}

func TestNoServerBehindTheProxyResetsTheClient(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := l.Addr().String()
	_ = l.Close()
	conn, err := net.Dial("tcp", faultproxy.Start(t, gone).Addr())
	if err != nil {
		return // refused even earlier
	}
	defer conn.Close()
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("got %v, want a reset", err)
	}
}
