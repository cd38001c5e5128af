package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Secrets may stand in files of their own, which are read again for every
// connection, so that a password is rotated without a restart. Config holds the
// names of the files; nothing here keeps what was in them.

// secretFile returns the content of a file without its last line break, which
// editors and echo add.
func secretFile(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err // the caller names the file
		}
		return "", fmt.Errorf("read %s: %w", show(path), err)
	}
	s := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if s == "" {
		return "", fmt.Errorf("read %s: it is empty", show(path))
	}
	return s, nil
}

// sourceDSN is the complete connection string of PostgreSQL.
func (c Config) sourceDSN() (string, error) {
	s := c.Source
	dsn := s.DSN
	if s.DSNFile != "" {
		var err error
		if dsn, err = secretFile(s.DSNFile); err != nil {
			return "", fmt.Errorf("source.dsn_file: %w", err)
		}
	}
	if s.PasswordFile == "" || dsn == "" {
		return dsn, nil
	}
	if dsnHasPassword(dsn) {
		return "", errors.New("source.password_file: the connection string has a password already")
	}
	password, err := secretFile(s.PasswordFile)
	if err != nil {
		return "", fmt.Errorf("source.password_file: %w", err)
	}
	return withPassword(dsn, password), nil
}

func isURLDSN(dsn string) bool {
	return strings.HasPrefix(dsn, "postgres://") || strings.HasPrefix(dsn, "postgresql://")
}

// withPassword adds a password to a connection string that has none.
func withPassword(dsn, password string) string {
	if !isURLDSN(dsn) {
		return dsn + " password='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password) + "'"
	}
	sep := "?"
	if strings.Contains(dsn, "?") {
		sep = "&"
	}
	// As in libpq, a plus sign in the query is no space.
	return dsn + sep + "password=" + strings.ReplaceAll(url.QueryEscape(password), "+", "%20")
}

func dsnHasPassword(dsn string) bool {
	if !isURLDSN(dsn) {
		return passwordWord().MatchString(dsn)
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return false // checkDSN says what is wrong with it
	}
	_, set := u.User.Password()
	return set || u.Query().Has("password")
}

// passwordWord finds password='...' and password=... among key=value words.
func passwordWord() *regexp.Regexp {
	return regexp.MustCompile(`(?i)\b(password|sslpassword)(\s*=\s*)('(?:[^'\\]|\\.)*'?|(?:[^\s\\]|\\.)+)`)
}

// brokerURLs are the complete URLs of the brokers.
func (c Config) brokerURLs() ([]string, error) {
	p := c.Publish
	urls := p.URLs
	if p.URLsFile != "" {
		text, err := secretFile(p.URLsFile)
		if err != nil {
			return nil, fmt.Errorf("publish.urls_file: %w", err)
		}
		urls = nil
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); line != "" {
				urls = append(urls, line)
			}
		}
	}
	if p.PasswordFile == "" || len(urls) == 0 {
		return urls, nil
	}
	password, err := secretFile(p.PasswordFile)
	if err != nil {
		return nil, fmt.Errorf("publish.password_file: %w", err)
	}
	complete := make([]string, len(urls))
	for i, s := range urls {
		u, err := url.Parse(s)
		if err != nil {
			return nil, fmt.Errorf("publish.urls[%d] %s", i, checkBrokerURL(s))
		}
		if _, set := u.User.Password(); set {
			return nil, fmt.Errorf("publish.password_file: publish.urls[%d] has a password already", i)
		}
		if u.User.Username() == "" {
			return nil, fmt.Errorf("publish.password_file: publish.urls[%d] names no user whose password that could be", i)
		}
		u.User = url.UserPassword(u.User.Username(), password)
		complete[i] = u.String()
	}
	return complete, nil
}

const masked = "***"

// maskDSN hides the passwords in a connection string, and all of it if it is
// none: then nobody knows where a password is.
func maskDSN(dsn string) string {
	if dsn == "" {
		return ""
	}
	pc, err := pgconn.ParseConfig(dsn)
	if err != nil {
		return masked
	}
	shown := passwordWord().ReplaceAllString(dsn, "${1}${2}"+masked)
	if isURLDSN(dsn) {
		if shown = maskURL(dsn); shown == masked {
			return masked
		}
	}
	// PGPASSWORD and the password file are in pc too, and never in the text.
	if dsnHasPassword(dsn) && pc.Password != "" && strings.Contains(shown, pc.Password) && !strings.Contains(masked, pc.Password) {
		return masked // it is part of something else, such as the name of the host
	}
	return shown
}

// strayAt reports whether a URL has an @ behind its host. It may be the one that
// ends a password with a slash in it: a URL reads postgres://u:12/3@db as the port
// 12 and a path.
func strayAt(u *url.URL) bool {
	return strings.Contains(u.EscapedPath()+u.RawQuery+u.EscapedFragment(), "@")
}

// maskURL hides the passwords in a URL, and all of it if it does not parse.
func maskURL(s string) string {
	u, err := url.Parse(s)
	if err != nil || u.Opaque != "" {
		return masked
	}
	userinfo := ""
	if u.User != nil {
		userinfo = url.User(u.User.Username()).String()
		if _, set := u.User.Password(); set {
			userinfo += ":" + masked
		}
		userinfo += "@"
	}
	if strayAt(u) {
		return masked
	}
	u.User = nil
	query := u.Query()
	var words []string
	for word := range strings.SplitSeq(u.RawQuery, "&") {
		name, _, _ := strings.Cut(word, "=")
		if query.Has(name) && strings.Contains(strings.ToLower(name), "password") {
			word = name + "=" + masked
		}
		words = append(words, word)
	}
	u.RawQuery = strings.Join(words, "&")
	return strings.Replace(u.String(), "//", "//"+userinfo, 1)
}
