package filestore

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"

	"github.com/cdcpub/cdcpub/offsets"
)

// The file, in every format version, starts with a line of magic and version.
// In version 1 the checkpoint follows as indented JSON, so that a person can
// read it in an emergency, and then one line with the CRC-32C of everything
// before that line:
//
//	cdcpub-checkpoint 1
//	{
//	  "source": { ...
//	}
//	crc32c 1a2b3c4d
const (
	magic       = "cdcpub-checkpoint "
	version     = 1
	trailer     = "crc32c "
	trailerSize = len(trailer) + 8 + len("\n")
)

// CorruptError says that the checkpoint file is not what Save wrote. The file is
// left as it is: only a person can tell a damaged disk from a wrong path, and a
// connector that started over would skip or repeat events without a word.
type CorruptError struct {
	Path   string // the checkpoint file
	Reason string // follows the path in a sentence
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("checkpoint file %s %s; nothing was changed: mount the right directory, "+
		"or start over with `cdcpub teardown --without-state` (every row of the table is published again)", e.Path, e.Reason)
}

// VersionError says that the checkpoint file was written in a format that this
// version of cdcpub does not know.
type VersionError struct {
	Path    string // the checkpoint file
	Version int
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("checkpoint file %s has format version %d and this cdcpub reads version %d; nothing was changed: "+
		"run the version of cdcpub that wrote it, or a newer one", e.Path, e.Version, version)
}

func encode(cp offsets.Checkpoint) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s%d\n", magic, version)
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(cp); err != nil {
		return nil, err
	}
	fmt.Fprintf(&b, "%s%s\n", trailer, checksum(b.Bytes()))
	return b.Bytes(), nil
}

// decode reads the whole content of the file at path, which it only needs for
// its errors: *CorruptError and *VersionError.
func decode(path string, data []byte) (offsets.Checkpoint, error) {
	corrupt := func(format string, args ...any) (offsets.Checkpoint, error) {
		return offsets.Checkpoint{}, &CorruptError{Path: path, Reason: fmt.Sprintf(format, args...)}
	}
	if len(data) == 0 {
		return corrupt("is empty")
	}
	first, _, complete := strings.Cut(string(data[:min(len(data), 64)]), "\n")
	written, ours := strings.CutPrefix(first, magic)
	if !complete || !ours {
		return corrupt("does not begin with a line %q and a version", strings.TrimSpace(magic))
	}
	// The version comes before the checksum: a later version may end otherwise.
	v, err := strconv.Atoi(written)
	if err != nil || strconv.Itoa(v) != written || v < 1 {
		return corrupt("has the malformed format version %q", written)
	}
	if v != version {
		return offsets.Checkpoint{}, &VersionError{Path: path, Version: v}
	}

	split := max(0, len(data)-trailerSize)
	content, end := data[:split], string(data[split:])
	if !bytes.HasSuffix(content, []byte("\n")) || !strings.HasPrefix(end, trailer) || !strings.HasSuffix(end, "\n") {
		return corrupt("does not end with its checksum: it is cut off, or something was written after it")
	}
	if got, want := checksum(content), end[len(trailer):len(end)-1]; got != want {
		return corrupt("is damaged: its checksum is %s and it says %q", got, want)
	}

	// A field that this version does not know may change what the others mean.
	var cp offsets.Checkpoint
	dec := json.NewDecoder(bytes.NewReader(content[len(first):]))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&cp); err != nil {
		return corrupt("cannot be understood: %v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return corrupt("has something between its JSON and its checksum")
	}
	if cp.Epoch == 0 {
		return corrupt("has no epoch, and every saved checkpoint has one")
	}
	return cp, nil
}

func checksum(b []byte) string {
	return fmt.Sprintf("%08x", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}
