package monitor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server answers /metrics, /livez, /readyz, /api/status and /. Set its fields
// before Start. One goroutine owns it; its functions are called from others.
type Server struct {
	Addr string // host:port; port 0 lets the system choose
	// Status is called once for each scrape and for each request that shows
	// something, from several goroutines at once. It must not wait for a server.
	Status func() Status
	// Live returns what stands still although it could move, or nil. Whoever
	// watches /livez restarts the process on an error, which cures nothing that is
	// wrong elsewhere.
	Live func() error
	// ErrorLog gets what goes wrong with single connections; nil is standard error.
	ErrorLog *log.Logger

	http   *http.Server
	addr   net.Addr
	served chan error
}

// Limits on one request. Answers are small and made in memory: whatever takes
// longer is a client that does not read, and must not hold a connection for ever.
const (
	readTimeout    = 5 * time.Second
	writeTimeout   = 30 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
)

// Start listens and returns; requests are answered until Shutdown. The error
// says that the address cannot be listened on.
func (s *Server) Start() error {
	listener, err := net.Listen("tcp", s.Addr)
	if err != nil {
		return fmt.Errorf("start monitor: %w", err)
	}
	s.addr = listener.Addr()
	s.http = &http.Server{
		Handler:        s.handler(),
		ReadTimeout:    readTimeout,
		WriteTimeout:   writeTimeout,
		IdleTimeout:    idleTimeout,
		MaxHeaderBytes: maxHeaderBytes,
		ErrorLog:       s.ErrorLog,
	}
	s.served = make(chan error, 1)
	go func() { s.served <- s.http.Serve(listener) }()
	return nil
}

// Address is where a started server listens.
func (s *Server) Address() net.Addr { return s.addr }

// Shutdown stops listening, waits for requests that are being answered and,
// once ctx is done, cuts them off. Nothing of the server is left running when it
// returns. The error is ctx's, or why the server had stopped answering before.
// It does nothing before Start and when called again.
func (s *Server) Shutdown(ctx context.Context) error {
	if s.http == nil {
		return nil
	}
	err := s.http.Shutdown(ctx)
	if err != nil {
		// Closing can only fail where the listener's was closed already.
		_ = s.http.Close()
	}
	if served := <-s.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	s.http = nil
	if err != nil {
		return fmt.Errorf("stop monitor: %w", err)
	}
	return nil
}

func (s *Server) handler() http.Handler {
	// A registry of our own: the default one is shared by the whole process, and
	// any library may have added to it.
	registry := prometheus.NewRegistry()
	registry.MustRegister(newCollector(s.Status), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	opts := promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}
	if s.ErrorLog != nil {
		opts.ErrorLog = s.ErrorLog
	}

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, opts))
	mux.HandleFunc("GET /livez", s.livez)
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.HandleFunc("GET /api/status", s.apiStatus)
	mux.HandleFunc("GET /{$}", s.index)
	return mux
}

func (s *Server) livez(w http.ResponseWriter, _ *http.Request) {
	if err := s.Live(); err != nil {
		writeText(w, http.StatusServiceUnavailable, "not live: "+err.Error())
		return
	}
	writeText(w, http.StatusOK, "live")
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	status := s.Status()
	switch {
	case status.Ready:
		writeText(w, http.StatusOK, "ready")
	case status.Reason == "":
		writeText(w, http.StatusServiceUnavailable, "not ready: "+string(status.State))
	default:
		writeText(w, http.StatusServiceUnavailable, "not ready: "+string(status.State)+": "+status.Reason)
	}
}

func (s *Server) apiStatus(w http.ResponseWriter, _ *http.Request) {
	body, err := json.MarshalIndent(s.Status(), "", "  ")
	if err != nil {
		// A figure that is no number, such as an age of +Inf.
		http.Error(w, fmt.Sprintf("encode status: %v", err), http.StatusInternalServerError)
		return
	}
	write(w, http.StatusOK, "application/json", append(body, '\n'))
}

func (s *Server) index(w http.ResponseWriter, _ *http.Request) {
	writeText(w, http.StatusOK, "cdcpub "+s.Status().Version+`

/api/status  what it is doing, how far each stage has come and what waits (JSON)
/readyz      200 if what commits now is published, unless its aggregate waits; else 503 and why not
/livez       200, or 503 if it stands still although it could move
/metrics     figures for Prometheus`)
}

func writeText(w http.ResponseWriter, code int, text string) {
	write(w, code, "text/plain; charset=utf-8", []byte(text+"\n"))
}

func write(w http.ResponseWriter, code int, contentType string, body []byte) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store") // a proxy's old answer would be a wrong one
	w.WriteHeader(code)
	// The client has gone if this fails, and there is nobody left to tell.
	_, _ = w.Write(body)
}
