package main

import (
	"errors"
	"math"
	"strconv"
	"strings"
)

// ByteSize is a number of bytes. In the configuration it is written as a whole
// number with KiB, MiB or GiB, or as plain bytes.
type ByteSize int64

var errByteSize = errors.New("want a size such as 64KiB, 32MiB or 1GiB, or a whole number of bytes")

// ParseByteSize reads what String prints. Decimal units (MB) and fractions are
// refused rather than rounded: a limit should be the number that was written.
func ParseByteSize(s string) (ByteSize, error) {
	digits, shift := s, 0
	for _, unit := range byteUnits() {
		if d, ok := strings.CutSuffix(s, unit.name); ok {
			digits, shift = d, unit.shift
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || n > math.MaxInt64>>shift {
		return 0, errByteSize
	}
	return ByteSize(n) << shift, nil
}

// String prints b in the largest unit that loses nothing.
func (b ByteSize) String() string {
	for _, unit := range byteUnits() {
		if b != 0 && b%(1<<unit.shift) == 0 {
			return strconv.FormatInt(int64(b>>unit.shift), 10) + unit.name
		}
	}
	return strconv.FormatInt(int64(b), 10)
}

type byteUnit struct {
	name  string
	shift int
}

func byteUnits() []byteUnit {
	return []byteUnit{{"GiB", 30}, {"MiB", 20}, {"KiB", 10}}
}
