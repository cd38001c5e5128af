package filestore_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
)

// sample has every field set. It is what testdata/checkpoint-v1 holds.
func sample() offsets.Checkpoint {
	return offsets.Checkpoint{
		Source: offsets.Source{
			SystemID:       "7423190587216473098",
			Timeline:       2,
			Database:       "orders",
			Slot:           "cdcpub",
			Publication:    "cdcpub",
			PublicationOID: 16412,
			Tables: []offsets.Table{
				{Name: "public.outbox", OID: 16390, PublicationRel: 16413},
				{Name: "billing.outbox", OID: 16401, PublicationRel: 16414},
			},
			Scope: "9f2c1d7be04a5583",
		},
		Epoch: 7,
		Phase: offsets.PhaseStreaming,
		Pos: offsets.Position{
			LSN: 0x16_B374D848, Tx: 0x16_B3750010, Done: 12,
			Last: offsets.Row{Table: "public.outbox", ID: "3f0c8a52-6f1e-4f4b-9a55-0d3a6c1be7a1"},
		},
		Holes: []offsets.Hole{{
			Kind:   "snapshot-never",
			Below:  0x16_A0000028,
			Reason: "snapshot.mode is never <& rows were published by the old poller>",
			Since:  time.Date(2026, 3, 14, 15, 9, 26, 535_000_000, time.UTC),
		}},
	}
}

// The promise of the state format: what version 1 wrote is read for ever. Change
// the file only together with the format version.
func TestTheVersion1SampleIsReadAndWritten(t *testing.T) {
	want, err := os.ReadFile("testdata/checkpoint-v1")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write(t, dir, want)
	cp, err := filestore.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample(), cp); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(string(want), string(savedSample(t))); diff != "" {
		t.Errorf("written (-want +got):\n%s", diff)
	}
}

func TestADamagedFileIsRefusedAndKept(t *testing.T) {
	resealed := func(change func(string) string) func([]byte) []byte {
		return func(b []byte) []byte { return seal(change(string(b[:len(b)-trailerSize]))) }
	}
	replaced := func(old, with string) func([]byte) []byte {
		return resealed(func(s string) string { return strings.Replace(s, old, with, 1) })
	}
	cases := map[string]struct {
		damage func([]byte) []byte
		reason string // of a CorruptError
	}{
		"empty, as after a crash without fsync": {
			func([]byte) []byte { return nil },
			"is empty",
		},
		"zeros, as some file systems leave after a crash": {
			func(b []byte) []byte { return make([]byte, len(b)) },
			"does not begin with",
		},
		"someone else's file": {
			func([]byte) []byte { return []byte("{\"offset\": 12}\n") },
			"does not begin with",
		},
		"something in front": {
			func(b []byte) []byte { return append([]byte("\n"), b...) },
			"does not begin with",
		},
		"a byte order mark in front": {
			func(b []byte) []byte { return append([]byte("\xef\xbb\xbf"), b...) },
			"does not begin with",
		},
		"the first line alone, cut off": {
			func([]byte) []byte { return []byte("cdcpub-checkpoint 1") },
			"does not begin with",
		},
		"the first line alone": {
			func([]byte) []byte { return []byte("cdcpub-checkpoint 1\n") },
			"does not end with its checksum",
		},
		"Windows line ends": {
			func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n")) },
			"malformed format version",
		},
		"version 0": {
			replaced("checkpoint 1", "checkpoint 0"),
			"malformed format version \"0\"",
		},
		"a version with a leading zero": {
			replaced("checkpoint 1", "checkpoint 01"),
			"malformed format version \"01\"",
		},
		"a version that is no number": {
			replaced("checkpoint 1", "checkpoint one"),
			"malformed format version \"one\"",
		},
		"no last line": {
			func(b []byte) []byte { return b[:len(b)-trailerSize] },
			"does not end with its checksum",
		},
		"a checksum that is not on a line of its own": {
			resealed(func(s string) string { return strings.TrimSuffix(s, "\n") }),
			"does not end with its checksum",
		},
		"no newline at the end": {
			func(b []byte) []byte { return b[:len(b)-1] },
			"does not end with its checksum",
		},
		"a byte behind the last line": {
			func(b []byte) []byte { return append(b, '\n') },
			"does not end with its checksum",
		},
		"another checkpoint behind the last line": {
			func(b []byte) []byte { return append(b, b...) },
			"is damaged: its checksum is",
		},
		"a position changed by hand": {
			func(b []byte) []byte { return bytes.Replace(b, []byte("B374D848"), []byte("B374D849"), 1) },
			"is damaged: its checksum is",
		},
		"a checksum in capitals": {
			func(b []byte) []byte {
				return append(b[:len(b)-9:len(b)-9], bytes.ToUpper(b[len(b)-9:])...)
			},
			"is damaged: its checksum is",
		},
		"a field of another version": {
			replaced(`"epoch": 7`, `"epoch": 7, "cluster": 1`),
			`cannot be understood: json: unknown field "cluster"`,
		},
		"an unknown field deep inside": {
			replaced(`"done": 12`, `"done": 12, "undone": 1`),
			`cannot be understood: json: unknown field "undone"`,
		},
		"a position with trailing characters": {
			replaced("16/B374D848", "16/B374D848x"),
			"cannot be understood: parse LSN",
		},
		"a number out of range": {
			replaced(`"timeline": 2`, `"timeline": 4294967296`),
			"cannot be understood",
		},
		"no JSON": {
			resealed(func(string) string { return "cdcpub-checkpoint 1\n" }),
			"cannot be understood: EOF",
		},
		"cut off JSON": {
			resealed(func(s string) string { return s[:len(s)/2] + "\n" }),
			"cannot be understood",
		},
		"two JSON values": {
			resealed(func(s string) string { return s + "{}\n" }),
			"has something between its JSON and its checksum",
		},
		"garbage behind the JSON": {
			resealed(func(s string) string { return s + "#\n" }),
			"has something between its JSON and its checksum",
		},
		"an empty object, which would look like a first start": {
			resealed(func(string) string { return "cdcpub-checkpoint 1\n{}\n" }),
			"has no epoch",
		},
		"null, which would look like a first start": {
			resealed(func(string) string { return "cdcpub-checkpoint 1\nnull\n" }),
			"has no epoch",
		},
	}
	good := savedSample(t)
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			err := refused(t, c.damage(bytes.Clone(good)))
			var corrupt *filestore.CorruptError
			if !errors.As(err, &corrupt) {
				t.Fatalf("error %v, want a CorruptError", err)
			}
			if !strings.Contains(corrupt.Reason, c.reason) {
				t.Errorf("reason %q, want %q", corrupt.Reason, c.reason)
			}
			for _, part := range []string{corrupt.Path, "nothing was changed", "the right directory", "`cdcpub teardown --without-state`"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not mention %q", err, part)
				}
			}
		})
	}
}

func TestAFileOfANewerVersionIsRefusedAndKept(t *testing.T) {
	for name, data := range map[string][]byte{
		"in the same frame":        seal("cdcpub-checkpoint 2\n{\"format\": \"new\"}\n"),
		"in a frame of its own":    []byte("cdcpub-checkpoint 10\n\x00\x01binary"),
		"the highest there is":     []byte("cdcpub-checkpoint 9223372036854775807\n"),
		"with the first line only": []byte("cdcpub-checkpoint 2\n"),
	} {
		t.Run(name, func(t *testing.T) {
			err := refused(t, data)
			var newer *filestore.VersionError
			if !errors.As(err, &newer) {
				t.Fatalf("error %v, want a VersionError", err)
			}
			for _, part := range []string{
				newer.Path, fmt.Sprintf("format version %d and", newer.Version), "reads version 1", "run the version of cdcpub that wrote it",
			} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not mention %q", err, part)
				}
			}
		})
	}
}

func TestAFileTornAtAnyLengthIsRefused(t *testing.T) {
	good := savedSample(t)
	dir := t.TempDir()
	for n := range good {
		write(t, dir, good[:n])
		if err := readErr(t, dir); err == nil {
			t.Fatalf("the first %d of %d bytes were taken for a checkpoint", n, len(good))
		}
	}
}

func TestAFlippedBitAnywhereIsRefused(t *testing.T) {
	good := savedSample(t)
	dir := t.TempDir()
	for i := range good {
		for _, bit := range []int{i % 8, 5} { // bit 5 turns capitals into small letters
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			write(t, dir, bad)
			if err := readErr(t, dir); err == nil {
				t.Fatalf("bit %d of byte %d, %q, was flipped and nobody saw it", bit, i, good[i])
			}
		}
	}
}

// FuzzRead holds Read against any content: it refuses with a typed error, or
// what it accepts survives being saved and read again.
func FuzzRead(f *testing.F) {
	good, err := os.ReadFile("testdata/checkpoint-v1")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good, false)
	f.Add(good[:len(good)/2], false)
	f.Add([]byte("cdcpub-checkpoint 2\n"), false)
	f.Add([]byte("cdcpub-checkpoint 1\n{\"epoch\": 1}\n"), true)
	f.Fuzz(func(t *testing.T, data []byte, sealed bool) {
		if sealed { // or the checksum would keep the fuzzer out of the JSON
			data = seal(string(data))
		}
		dir := t.TempDir()
		write(t, dir, data)
		if readErr(t, dir) != nil {
			return
		}
		want, err := filestore.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		store := open(t, dir)
		cp := acquire(t, store)
		save(t, store, cp)
		got, err := filestore.Read(dir)
		if err != nil {
			t.Fatalf("read what was just saved: %v", err)
		}
		want.Epoch++
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// refused checks that both ways to read data fail alike and leave it in place,
// and returns the error.
func refused(t *testing.T, data []byte) error {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, data)
	err := readErr(t, dir)
	if err == nil {
		t.Fatalf("read %q without an error", data)
	}
	store := open(t, dir)
	cp, acquireErr := store.Acquire(t.Context())
	if acquireErr == nil || errors.Unwrap(acquireErr).Error() != errors.Unwrap(err).Error() {
		t.Errorf("Acquire fails with %v and Read with %v", acquireErr, err)
	}
	if err := store.Save(t.Context(), cp); !errors.Is(err, offsets.ErrFenced) {
		t.Errorf("Save after a failed Acquire: %v, want ErrFenced", err)
	}
	if after := read(t, dir, "checkpoint"); !bytes.Equal(after, data) {
		t.Errorf("the refused file was changed to %q", after)
	}
	return err
}

// readErr returns the error of Read and checks its type.
func readErr(t *testing.T, dir string) error {
	t.Helper()
	cp, err := filestore.Read(dir)
	if err == nil {
		return nil
	}
	var corrupt *filestore.CorruptError
	var newer *filestore.VersionError
	if !errors.As(err, &corrupt) && !errors.As(err, &newer) {
		t.Errorf("error %v, want a CorruptError or a VersionError", err)
	}
	if diff := cmp.Diff(offsets.Checkpoint{}, cp); diff != "" {
		t.Errorf("an error and a checkpoint (-want +got):\n%s", diff)
	}
	return err
}

const trailerSize = len("crc32c 00000000\n")

// seal adds the last line that makes content pass the checksum. It is written
// here a second time, from the format's description.
func seal(content string) []byte {
	sum := crc32.Checksum([]byte(content), crc32.MakeTable(crc32.Castagnoli))
	return fmt.Appendf([]byte(content), "crc32c %08x\n", sum)
}

// savedSample returns the file that Save makes of sample.
func savedSample(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	// The epoch is the store's to count, so it starts one below.
	before := fmt.Sprintf("cdcpub-checkpoint 1\n{\"epoch\": %d}\n", sample().Epoch-1)
	write(t, dir, seal(before))
	store := open(t, dir)
	acquire(t, store)
	save(t, store, sample())
	return read(t, dir, "checkpoint")
}

func write(t *testing.T, dir string, data []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "checkpoint"), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, dir, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}
