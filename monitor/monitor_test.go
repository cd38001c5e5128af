package monitor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fullStatus has a different figure in every place, so that two that were
// exchanged would show.
func fullStatus() Status {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	age := func(seconds float64) *float64 { return &seconds }
	return Status{
		Version: "1.2.3", StartedAt: at, State: StateWaiting, Ready: true,
		Reason:  "2 aggregates wait: no queue takes their events; bind one to exchange outbox.event.order",
		Refusal: &Refusal{Code: "gap", Text: "events lost", Hint: "cdcpub offset adopt"},
		Source: Source{
			Slot: "shop", Publication: "shop_pub", Tables: []string{"public.outbox"},
			Received: Position{"0/400", 1024},
		},
		Stages: []Stage{
			{Name: StageRead, Position: Position{"0/300 + 12 of 0/380", 768}, OldestUnfinished: age(0.5)},
			{Name: StagePublished, Position: Position{"0/2F0", 752}, OldestUnfinished: age(1.5)},
			{Name: StageConfirmed, Position: Position{"0/2E0", 736}, OldestUnfinished: age(0)},
			{Name: StageSaved, Position: Position{"0/2D0", 720}},
			{Name: StageAcked}, // nothing acknowledged yet
		},
		Relay:     Relay{Pending: 11, Span: 12, HeldBytes: 13, WaitingAggregates: 14, WaitingEvents: 35, Window: 15, WindowBytes: 16},
		Publisher: Publisher{Connected: true, Blocked: false, InFlight: 17, Reconnects: 18, LastError: "connection refused"},
		Snapshot:  &Snapshot{Rows: 32, Estimated: 33, Done: true},
		Counters: Counters{
			EventsRead: 21, Confirmed: 22, Returned: 23, Nacked: 24, Refused: 25, Retried: 26, Suppressed: 27, Ignored: 28,
			CheckpointSaves: 29, CheckpointFailures: 30, Resent: 31,
		},
		Waiting: []Waiting{{
			AggregateType: "order", AggregateID: "o-1", EventID: "e-1", Queued: 34, Cause: "no_queue", Exchange: "outbox.event.order", RoutingKey: "o-1",
			Reason: "returned: 312 NO_ROUTE", Attempts: 3, Since: at,
		}},
		ConfirmSeconds: &Histogram{Bounds: []float64{0.001, 0.01, 0.1}, Counts: []uint64{5, 6, 0, 1}, Sum: 2.5},
	}
}

// handlerOf serves status as a live connector.
func handlerOf(status Status) http.Handler {
	s := Server{Status: func() Status { return status }, Live: func() error { return nil }}
	return s.handler()
}

func get(t *testing.T, h http.Handler, method, path string) *http.Response {
	t.Helper()
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest(method, path, nil))
	return rec.Result()
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatalf("read answer: %v", err)
	}
	return string(b)
}

func wantGolden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("answer differs from %s (-want +got):\n%s", file, diff)
	}
}

// ownMetrics leaves out what the collectors of Go and of the process add, which
// differs from run to run.
func ownMetrics(text string) string {
	var own strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE "), "cdcpub_") {
			own.WriteString(line)
		}
	}
	return own.String()
}

func TestMetrics(t *testing.T) {
	r := get(t, handlerOf(fullStatus()), http.MethodGet, "/metrics")
	text := body(t, r)
	wantGolden(t, "testdata/metrics.txt", ownMetrics(text))
	for _, name := range []string{"go_goroutines ", "process_resident_memory_bytes "} {
		if !strings.Contains(text, "\n"+name) {
			t.Errorf("/metrics does not have %s", name)
		}
	}
}

func TestMetricsOfANewConnector(t *testing.T) {
	// No stage knows its position yet: no zero may stand in for it.
	text := ownMetrics(body(t, get(t, handlerOf(Status{Version: "dev", State: StateStarting}), http.MethodGet, "/metrics")))
	for _, absent := range []string{"cdcpub_position_bytes{", "cdcpub_oldest_unfinished_seconds{", "cdcpub_confirm_seconds"} {
		if strings.Contains(text, absent) {
			t.Errorf("/metrics has %s", absent)
		}
	}
	for _, present := range []string{"cdcpub_ready 0\n", "cdcpub_build_info{version=\"dev\"} 1\n", "cdcpub_outcomes_total{kind=\"nacked\"} 0\n"} {
		if !strings.Contains(text, present) {
			t.Errorf("/metrics does not have %q", present)
		}
	}
}

func TestMetricsFollowConventions(t *testing.T) {
	// A pedantic registry also checks what is collected against what is described.
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(newCollector(fullStatus))
	families, err := registry.Gather()
	if err != nil {
		t.Fatalf("gather: %v", err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatalf("lint metrics: %v", err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestScrapeAsksForStatusOnce(t *testing.T) {
	var calls atomic.Int64
	s := Server{Status: func() Status { calls.Add(1); return fullStatus() }}
	h := s.handler()
	calls.Store(0) // registering may ask too
	body(t, get(t, h, http.MethodGet, "/metrics"))
	if n := calls.Load(); n != 1 {
		t.Errorf("status was asked for %d times, want 1", n)
	}
}

func TestBrokenHistogramCostsOnlyItself(t *testing.T) {
	status := fullStatus()
	status.ConfirmSeconds = &Histogram{Bounds: []float64{1, 2}, Counts: []uint64{3}}
	var logged bytes.Buffer
	s := Server{Status: func() Status { return status }, ErrorLog: log.New(&logged, "", 0)}
	text := body(t, get(t, s.handler(), http.MethodGet, "/metrics"))
	if strings.Contains(text, "cdcpub_confirm_seconds") || !strings.Contains(text, "\ncdcpub_events_read_total 21\n") {
		t.Errorf("want all metrics but cdcpub_confirm_seconds, got:\n%s", ownMetrics(text))
	}
	if want := "histogram with 2 bounds and 1 counts"; !strings.Contains(logged.String(), want) {
		t.Errorf("log is %q, want %q in it", logged.String(), want)
	}
}

func TestAPIStatus(t *testing.T) {
	r := get(t, handlerOf(fullStatus()), http.MethodGet, "/api/status")
	text := body(t, r)
	wantGolden(t, "testdata/status.json", text)
	if got := r.Header.Get("Content-Type"); got != "application/json" {
		t.Errorf("content type is %q", got)
	}
	if got := r.Header.Get("Cache-Control"); got != "no-store" {
		t.Errorf("cache control is %q", got)
	}

	var decoded Status
	if err := json.Unmarshal([]byte(text), &decoded); err != nil {
		t.Fatalf("decode: %v", err)
	}
	if diff := cmp.Diff(fullStatus(), decoded); diff != "" {
		t.Errorf("status does not survive JSON (-want +got):\n%s", diff)
	}
}

func TestFullStatusIsFull(t *testing.T) {
	// The golden files prove nothing about a field that fullStatus leaves out.
	// Blocked is the one that has to differ from its neighbour.
	status := fullStatus()
	for _, v := range []any{status, status.Source, status.Relay, status.Counters, *status.Refusal, *status.Snapshot, status.Waiting[0], *status.ConfirmSeconds} {
		rv := reflect.ValueOf(v)
		for i := range rv.NumField() {
			if rv.Field(i).IsZero() {
				t.Errorf("%s.%s is not set", rv.Type(), rv.Type().Field(i).Name)
			}
		}
	}
}

func TestStatusThatIsNoJSON(t *testing.T) {
	status := fullStatus()
	inf := math.Inf(1)
	status.Stages[0].OldestUnfinished = &inf
	r := get(t, handlerOf(status), http.MethodGet, "/api/status")
	if text := body(t, r); r.StatusCode != http.StatusInternalServerError || !strings.HasPrefix(text, "encode status: ") {
		t.Errorf("got %d %q", r.StatusCode, text)
	}
}

func TestProbes(t *testing.T) {
	tests := []struct {
		name   string
		path   string
		status Status
		live   error
		code   int
		body   string
	}{
		{"live while nothing stands still", "/livez", Status{}, nil, 200, "live\n"},
		{"live while refused, since a restart would not help", "/livez", Status{State: StateRefused}, nil, 200, "live\n"},
		{"not live says what stands still", "/livez", Status{Ready: true}, errors.New("relay loop has not turned for 2m"),
			503, "not live: relay loop has not turned for 2m\n"},
		{"ready", "/readyz", Status{Ready: true, State: StateStreaming}, nil, 200, "ready\n"},
		{"ready with a remark", "/readyz", Status{Ready: true, State: StateStreaming, Reason: "1 aggregates wait"}, nil, 200, "ready\n"},
		{"not ready says why", "/readyz", Status{State: StateRefused, Reason: "slot cdcpub is gone"},
			nil, 503, "not ready: refused: slot cdcpub is gone\n"},
		{"not ready without a reason says the state", "/readyz", Status{State: StateStarting}, nil, 503, "not ready: starting\n"},
		{"the index names the pages", "/", Status{Version: "1.2.3"}, nil, 200, `cdcpub 1.2.3

/api/status  what it is doing, how far each stage has come and what waits (JSON)
/readyz      200 if what commits now is published, unless its aggregate waits; else 503 and why not
/livez       200, or 503 if it stands still although it could move
/metrics     figures for Prometheus
`},
		{"other paths do not exist", "/debug/pprof/", Status{}, nil, 404, "404 page not found\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := Server{Status: func() Status { return tt.status }, Live: func() error { return tt.live }}
			r := get(t, s.handler(), http.MethodGet, tt.path)
			if got := body(t, r); r.StatusCode != tt.code || got != tt.body {
				t.Errorf("%s: got %d %q, want %d %q", tt.path, r.StatusCode, got, tt.code, tt.body)
			}
		})
	}
}

func TestOnlyReading(t *testing.T) {
	for _, path := range []string{"/", "/metrics", "/livez", "/readyz", "/api/status"} {
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
			if r := get(t, handlerOf(fullStatus()), method, path); r.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: got %d, want 405", method, path, r.StatusCode)
			}
		}
		if r := get(t, handlerOf(fullStatus()), http.MethodHead, path); r.StatusCode != http.StatusOK {
			t.Errorf("HEAD %s: got %d, want 200", path, r.StatusCode)
		}
	}
}

// start serves on a free port until the test ends.
func start(t *testing.T, s *Server) (baseURL string) {
	t.Helper()
	s.Addr = "127.0.0.1:0"
	if s.Live == nil {
		s.Live = func() error { return nil }
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The test's own context is done by now.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return "http://" + s.Address().String()
}

// client keeps no connection open that goleak would find.
func client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
}

func TestServesUntilShutdown(t *testing.T) {
	s := &Server{Status: fullStatus}
	base := start(t, s)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, path := range []string{"/metrics", "/readyz", "/api/status"} {
				r, err := client().Get(base + path)
				if err != nil {
					t.Errorf("get %s: %v", path, err)
					return
				}
				if body(t, r); r.StatusCode != http.StatusOK {
					t.Errorf("get %s: %s", path, r.Status)
				}
			}
		})
	}
	wg.Wait()
	for range 2 { // the second time it has nothing to do
		if err := s.Shutdown(t.Context()); err != nil {
			t.Fatalf("shutdown: %v", err)
		}
	}
	if _, err := client().Get(base + "/livez"); err == nil {
		t.Error("answers after shutdown")
	}
}

func TestShutdownBeforeStart(t *testing.T) {
	if err := new(Server).Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestStartSaysThatTheAddressIsTaken(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	s := Server{Addr: taken.Addr().String(), Status: fullStatus}
	err = s.Start()
	if want := "start monitor: listen tcp " + s.Addr + ": "; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error is %v, want %q...", err, want)
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Errorf("shutdown after a failed start: %v", err)
	}
}

func TestShutdownWaitsForAnAnswer(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	s := &Server{Status: func() Status { close(asked); <-release; return Status{Ready: true} }}
	base := start(t, s)
	// Only a shutdown that is under way lets the request go on.
	s.http.RegisterOnShutdown(func() { close(release) })
	answer := make(chan int, 1)
	go func() {
		r, err := client().Get(base + "/readyz")
		if err != nil {
			answer <- 0
			return
		}
		r.Body.Close()
		answer <- r.StatusCode
	}()
	<-asked
	if err := s.Shutdown(t.Context()); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if code := <-answer; code != http.StatusOK {
		t.Errorf("answer cut off by shutdown: %d", code)
	}
}

func TestShutdownCutsOffAtTheDeadline(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	s := &Server{Status: func() Status { close(asked); <-release; return Status{} }}
	base := start(t, s)
	failed := make(chan error, 1)
	go func() {
		r, err := client().Get(base + "/readyz")
		if err == nil {
			r.Body.Close()
		}
		failed <- err
	}()
	<-asked
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("shutdown: %v, want context.Canceled", err)
	}
	if err := <-failed; err == nil {
		t.Error("the request was answered, want it cut off")
	}
	close(release)
}

func TestBodiesAreNotLogged(t *testing.T) {
	var logged bytes.Buffer
	s := &Server{Status: fullStatus, ErrorLog: log.New(&logged, "", 0)}
	base := start(t, s)
	r, err := client().Post(base+"/api/status", "text/plain", strings.NewReader("hunter2"))
	if err != nil {
		t.Fatal(err)
	}
	if text := body(t, r); strings.Contains(text, "hunter2") {
		t.Errorf("answer repeats the body: %q", text)
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(logged.String(), "hunter2") {
		t.Errorf("log repeats the body: %q", logged.String())
	}
}
