package offsets

import (
	"fmt"
	"strconv"
	"strings"
)

// LSN is a byte position in PostgreSQL's write-ahead log. The zero LSN means
// "none": PostgreSQL never assigns it to a record.
type LSN uint64

// ParseLSN reads the form that PostgreSQL prints, "16/B374D848". Unlike
// pglogrepl.ParseLSN it refuses trailing characters, signs and halves above 32
// bits: a position read from a damaged file must not turn into another, valid
// position.
func ParseLSN(s string) (LSN, error) {
	hi, lo, ok := strings.Cut(s, "/")
	if !ok {
		return 0, fmt.Errorf("parse LSN %q: want two hexadecimal numbers separated by a slash", s)
	}
	h, err := parseHalf(hi)
	if err != nil {
		return 0, fmt.Errorf("parse LSN %q: %w", s, err)
	}
	l, err := parseHalf(lo)
	if err != nil {
		return 0, fmt.Errorf("parse LSN %q: %w", s, err)
	}
	return LSN(h<<32 | l), nil
}

func parseHalf(s string) (uint64, error) {
	v, err := strconv.ParseUint(s, 16, 32)
	// ParseUint alone takes any number of leading zeros.
	if err != nil || len(s) > 8 {
		return 0, fmt.Errorf("half %q: want 1 to 8 hexadecimal digits", s)
	}
	return v, nil
}

// String formats l the way PostgreSQL prints it.
func (l LSN) String() string {
	return fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l))
}

// IsZero reports whether l is no position at all.
func (l LSN) IsZero() bool { return l == 0 }

// MarshalText implements encoding.TextMarshaler with the form of String.
func (l LSN) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with the strictness of ParseLSN.
func (l *LSN) UnmarshalText(b []byte) error {
	v, err := ParseLSN(string(b))
	if err != nil {
		return err
	}
	*l = v
	return nil
}
