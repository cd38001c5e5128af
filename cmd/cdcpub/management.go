package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// management asks RabbitMQ's management plugin what AMQP has no question for.
type management struct {
	base     *url.URL
	user     string
	password string
	client   *http.Client
}

// newManagement logs in as the broker URL does, unless base names somebody else.
// Neither URL appears in an error: both may hold a password.
func newManagement(base, brokerURL string) (*management, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("--management: want http://HOST:15672 or https://HOST:15671")
	}
	broker, err := url.Parse(brokerURL)
	if err != nil {
		return nil, errors.New("read publish.urls: not a URL")
	}
	m := &management{base: u, user: "guest", password: "guest", // AMQP's own default
		client: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}}
	for _, from := range []*url.URL{broker, u} {
		if from.User != nil {
			m.user = from.User.Username()
			m.password, _ = from.User.Password()
		}
	}
	m.base.User = nil
	return m, nil
}

// bindings counts the bindings that have exchange as their source.
func (m *management) bindings(ctx context.Context, vhost, exchange string) (int, error) {
	path := "/api/exchanges/" + url.PathEscape(vhost) + "/" + url.PathEscape(exchange) + "/bindings/source"
	at := strings.TrimSuffix(m.base.String(), "/") + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return 0, fmt.Errorf("ask the management plugin: %w", err)
	}
	req.SetBasicAuth(m.user, m.password)
	resp, err := m.client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("ask the management plugin: %w", err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		return 0, fmt.Errorf("the management plugin refuses user %s: it takes the tag management", m.user)
	default:
		return 0, fmt.Errorf("the management plugin answers %s", resp.Status)
	}
	var list []struct {
		Source string `json:"source"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&list); err != nil {
		return 0, fmt.Errorf("read the answer of the management plugin: %w", err)
	}
	return len(list), nil
}

// vhostPath is a virtual host as the path of an AMQP URL; the default one is the
// empty path.
func vhostPath(vhost string) string {
	if vhost == "/" {
		return ""
	}
	return url.PathEscape(vhost)
}
