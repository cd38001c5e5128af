package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// mark is what has happened to an event.
type mark string

const (
	committed  mark = "committed"
	rolledBack mark = "rolled back"
	delivered  mark = "delivered"
	duplicate  mark = "delivered again"
)

const alarmColour = "1;31"

// colour is the parameter of the terminal's SGR sequence (ECMA-48).
func (m mark) colour() string {
	switch m {
	case committed:
		return "36"
	case rolledBack:
		return "35"
	case delivered:
		return "32"
	default:
		return "33"
	}
}

// screen prints whole lines, for several goroutines.
type screen struct {
	mu      sync.Mutex
	out     io.Writer
	colours bool
	began   time.Time
}

func newScreen(out io.Writer, colours bool) *screen {
	return &screen{out: out, colours: colours, began: time.Now()}
}

func (s *screen) event(m mark, order string, version int64, eventType, note string) {
	if note != "" {
		note = "  (" + note + ")"
	}
	s.line(m.colour(), fmt.Sprintf("%-15s  order %s v%d %s%s", m, order, version, eventType, note))
}

// say tells what the demo itself does.
func (s *screen) say(format string, args ...any) { s.line("", "-- "+fmt.Sprintf(format, args...)) }

// alarm is say for what must not be missed.
func (s *screen) alarm(format string, args ...any) {
	s.line(alarmColour, "-- "+fmt.Sprintf(format, args...))
}

func (s *screen) line(colour, text string) {
	if s.colours && colour != "" {
		text = "\x1b[" + colour + "m" + text + "\x1b[0m"
	}
	s.print(fmt.Sprintf("%6.2fs  %s", time.Since(s.began).Seconds(), text))
}

func (s *screen) print(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// That nobody reads any more is no reason to leave servers behind.
	_, _ = fmt.Fprintln(s.out, text)
}
