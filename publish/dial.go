package publish

import (
	"crypto/tls"
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	handshakeTimeout = 30 * time.Second // TCP, TLS and AMQP together
	defaultHeartbeat = 10 * time.Second
)

// target is one broker to dial. Its String is safe to log.
type target struct {
	uri       amqp.URI
	tls       *tls.Config // nil: plain TCP
	heartbeat time.Duration
	timeout   time.Duration // for the whole handshake
}

// parseTarget reads a broker URL. No error repeats any part of it: a password
// with an unescaped "/" or "@" may stand anywhere.
func parseTarget(raw string, base *tls.Config) (target, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return target{}, errors.New("not a URL; characters such as / @ : # ? % in the user name or password must be percent-encoded")
	}
	uri, err := amqp.ParseURI(raw)
	if err != nil {
		return target{}, errors.New("want amqp://user:password@host:port/vhost, or amqps")
	}
	t := target{uri: uri, heartbeat: defaultHeartbeat, timeout: handshakeTimeout}
	query := u.Query()
	for name := range query {
		switch name {
		case "heartbeat", "connection_timeout", "channel_max", "auth_mechanism", "server_name_indication":
		default: // certificates among them: they come with Config.TLS
			return target{}, errors.New("unknown query parameter; known are heartbeat, connection_timeout, channel_max, auth_mechanism and server_name_indication")
		}
	}
	if _, err := uriAuth(uri); err != nil {
		return target{}, err
	}
	if query.Has("heartbeat") {
		seconds, err := strconv.Atoi(query.Get("heartbeat"))
		if err != nil || seconds < 1 {
			return target{}, errors.New("heartbeat: want at least one second; without heartbeats a lost broker goes unnoticed")
		}
		t.heartbeat = time.Duration(seconds) * time.Second
	}
	if uri.ConnectionTimeout > 0 {
		t.timeout = time.Duration(uri.ConnectionTimeout) * time.Millisecond
	}
	if uri.Scheme == "amqps" {
		t.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		if base != nil {
			t.tls = base.Clone()
		}
		if uri.ServerName != "" {
			t.tls.ServerName = uri.ServerName
		}
		if t.tls.ServerName == "" {
			t.tls.ServerName = uri.Host
		}
	}
	return t, nil
}

func (t target) addr() string { return net.JoinHostPort(t.uri.Host, strconv.Itoa(t.uri.Port)) }

// String names the broker without user and password.
func (t target) String() string {
	if t.uri.Scheme == "" {
		return "none" // no URL could be read
	}
	return t.uri.Scheme + "://" + t.addr()
}

// config returns a new amqp.Config. The library changes the one it gets: it
// adds to Properties and, in some versions, wiped the credentials (amqp091-go
// issues #387 and #394), which a second dial would then lack. Recovery stays
// nil: the library's own recovery loses track of unconfirmed messages.
func (t target) config(name string) amqp.Config {
	auth, _ := uriAuth(t.uri) // was checked by parseTarget
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName(name)
	return amqp.Config{
		SASL:       auth,
		Vhost:      t.uri.Vhost,
		ChannelMax: t.uri.ChannelMax,
		FrameSize:  frameMax,
		Heartbeat:  t.heartbeat,
		Locale:     "en_US",
		Properties: properties,
	}
}

// uriAuth builds the authentication that a URL asks for.
func uriAuth(uri amqp.URI) ([]amqp.Authentication, error) {
	if len(uri.AuthMechanism) == 0 {
		return []amqp.Authentication{uri.PlainAuth()}, nil
	}
	var auth []amqp.Authentication
	for _, name := range uri.AuthMechanism {
		switch strings.ToLower(name) {
		case "plain":
			auth = append(auth, uri.PlainAuth())
		case "amqplain":
			auth = append(auth, uri.AMQPlainAuth())
		case "external":
			auth = append(auth, &amqp.ExternalAuth{})
		default:
			return nil, errors.New("unknown auth_mechanism; known are plain, amqplain and external")
		}
	}
	return auth, nil
}
