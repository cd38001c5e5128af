package main

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestShardsAreBoundByWhatTheRoutingKeyIs(t *testing.T) {
	for name, tc := range map[string]struct {
		key    string
		shards int
		want   shardPlan
		err    string
	}{
		"one queue gets everything": {"{aggregate_id}", 0, shardPlan{queues: []boundQueue{{"q", "#"}}}, ""},
		"aggregate IDs go through a consistent-hash exchange, each queue with the weight 1": {"{aggregate_id}", 2,
			shardPlan{hash: "q.shards", queues: []boundQueue{{"q.0", "1"}, {"q.1", "1"}}}, ""},
		"a partition is bound by its number":                   {"{partition:2}", 2, shardPlan{queues: []boundQueue{{"q.0", "0"}, {"q.1", "1"}}}, ""},
		"and with the text around it":                          {"a.{partition:2}.z", 2, shardPlan{queues: []boundQueue{{"q.0", "a.0.z"}, {"q.1", "a.1.z"}}}, ""},
		"another number of queues would leave partitions out":  {"{partition:3}", 2, shardPlan{}, "want --shards 3"},
		"a partition beside other placeholders has no binding": {"{tenant}.{partition:2}", 2, shardPlan{}, "other placeholders"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := planShards(tc.key, brokerOptions{queue: "q", shards: tc.shards})
			if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Fatalf("error %v, want %q", err, tc.err)
			}
			if d := cmp.Diff(tc.want, got, cmp.AllowUnexported(shardPlan{}, boundQueue{})); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRightsAreForWhatTheTemplateCanNameAndNoMore(t *testing.T) {
	for _, tc := range []struct {
		template, exchange string
		match              bool
	}{
		{"outbox.event.{aggregate_type}", "outbox.event.order", true},
		{"outbox.event.{aggregate_type}", "outboxXevent.order", false},
		{"outbox.event.{aggregate_type}", "my.outbox.event.order", false},
		{"{tenant}.events", "acme.events", true},
		{"{tenant}.events", "acme.events.other", false},
		{"events", "events", true},
		{"events", "events2", false},
	} {
		if got := regexp.MustCompile(exchangePattern(tc.template)).MatchString(tc.exchange); got != tc.match {
			t.Errorf("%s for %s: %v, want %v", exchangePattern(tc.template), tc.exchange, got, tc.match)
		}
	}
}

// The plugin's answers are a stranger's: whatever they are, check says what it
// could not find out, and shows no password.
func TestManagementAnswersBecomeACountOrAReason(t *testing.T) {
	for name, tc := range map[string]struct {
		code int
		body string
		want int
		err  string
	}{
		"bindings are counted":   {http.StatusOK, `[{"source":"x"},{"source":"x"}]`, 2, ""},
		"none is none":           {http.StatusOK, `[]`, 0, ""},
		"a user without the tag": {http.StatusUnauthorized, ``, 0, "refuses user me: it takes the tag management"},
		"an exchange that went":  {http.StatusNotFound, ``, 0, "answers 404"},
		"something else":         {http.StatusOK, `<html>`, 0, "read the answer of the management plugin"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				user, password, _ := r.BasicAuth()
				if user != "me" || password != "pass/word" || r.URL.EscapedPath() != "/api/exchanges/%2F/a%2Fb/bindings/source" {
					t.Errorf("asked %s as %s with %q", r.URL.EscapedPath(), user, password)
				}
				w.WriteHeader(tc.code)
				_, _ = w.Write([]byte(tc.body)) // the client will notice
			}))
			defer s.Close()
			m, err := newManagement(s.URL, "amqp://me:pass%2Fword@broker/")
			if err != nil {
				t.Fatal(err)
			}
			n, err := m.bindings(t.Context(), "/", "a/b")
			if n != tc.want || (err == nil) != (tc.err == "") || err != nil && (!strings.Contains(err.Error(), tc.err) || strings.Contains(err.Error(), "pass/word")) {
				t.Errorf("%d, %v; want %d, %q", n, err, tc.want, tc.err)
			}
		})
	}
	for _, url := range []string{"localhost:15672", "ftp://x", "http://", "http://me:secret@%zz"} {
		if _, err := newManagement(url, "amqp://x/"); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", url, err)
		}
	}
}
