package publish

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
)

func newPipe(t *testing.T) (*transport, net.Conn) {
	client, server := net.Pipe()
	t.Cleanup(func() { _ = server.Close() })
	return newTransport(client, client), server
}

func TestTransportAcceptsWritesWhileThePeerReadsNothing(t *testing.T) {
	tr, server := newPipe(t)
	var want bytes.Buffer
	b := []byte("0123456789")
	for range 10000 {
		b[0]++ // the caller reuses its buffer
		want.Write(b)
		if _, err := tr.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.Close(); err != nil { // flushes
		t.Fatal(err)
	}
	got, err := io.ReadAll(server)
	if err != nil || !bytes.Equal(got, want.Bytes()) {
		t.Errorf("read %d bytes (%v), want %d as written", len(got), err, want.Len())
	}
	<-tr.done
	if _, err := tr.Write(b); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
}

func TestTransportAbortEndsAWriteThatIsStuck(t *testing.T) {
	tr, _ := newPipe(t)
	if _, err := tr.Write([]byte("stuck")); err != nil {
		t.Fatal(err)
	}
	tr.Abort()
	<-tr.done
	if _, err := tr.Write([]byte("x")); err == nil {
		t.Error("write after abort succeeded")
	}
	tr.Abort()
	_ = tr.Close()
}

func TestTransportReportsAFailedWriteToTheNextAndClosesTheConnection(t *testing.T) {
	tr, server := newPipe(t)
	_ = server.Close()
	if _, err := tr.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	<-tr.done
	if _, err := tr.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("write after a failed one: %v", err)
	}
	if _, err := tr.Read(make([]byte, 1)); err == nil {
		t.Error("read succeeded")
	}
}
