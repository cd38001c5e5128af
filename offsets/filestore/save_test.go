package filestore_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
)

// That Save fsyncs the file before the rename and the directory after it cannot
// be seen by a test on a machine that does not lose power: that order stands in
// the code only.

func TestSaveIsFenced(t *testing.T) {
	rename := func(t *testing.T, from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(t *testing.T, path string) {
		t.Helper()
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	cases := map[string]struct {
		event func(t *testing.T, dir string)
		epoch func(acquired uint64) uint64
	}{
		"the checkpoint has an older epoch": {
			epoch: func(acquired uint64) uint64 { return acquired - 1 },
		},
		"the checkpoint has an epoch that was never acquired": {
			epoch: func(acquired uint64) uint64 { return acquired + 1 },
		},
		"the checkpoint has no epoch": {
			epoch: func(uint64) uint64 { return 0 },
		},
		"the lock file was deleted": {
			event: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "lock")) },
		},
		"the lock file was deleted and another process has taken the state": {
			event: func(t *testing.T, dir string) {
				remove(t, filepath.Join(dir, "lock"))
				startHolder(t, dir)
			},
		},
		"the lock file was replaced by a copy": {
			event: func(t *testing.T, dir string) {
				data := read(t, dir, "lock")
				remove(t, filepath.Join(dir, "lock"))
				if err := os.WriteFile(filepath.Join(dir, "lock"), data, 0o600); err != nil {
					t.Fatal(err)
				}
			},
		},
		"the directory was deleted": {
			event: remove,
		},
		"the directory was moved away": {
			event: func(t *testing.T, dir string) { rename(t, dir, dir+".old") },
		},
		"the directory was moved away and a backup put in its place": {
			event: func(t *testing.T, dir string) {
				rename(t, dir, dir+".old")
				save1(t, dir)
			},
		},
		"the directory was replaced by a file": {
			event: func(t *testing.T, dir string) {
				remove(t, dir)
				if err := os.WriteFile(dir, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			save1(t, dir)
			store := open(t, dir)
			cp := acquire(t, store)
			if c.epoch != nil {
				cp.Epoch = c.epoch(cp.Epoch)
			}
			if c.event != nil {
				c.event(t, dir)
			}
			before := tree(t, filepath.Dir(dir))
			if err := store.Save(t.Context(), cp); !errors.Is(err, offsets.ErrFenced) {
				t.Errorf("Save: %v, want ErrFenced", err)
			}
			if diff := cmp.Diff(before, tree(t, filepath.Dir(dir))); diff != "" {
				t.Errorf("the fenced Save changed files (-before +after):\n%s", diff)
			}
		})
	}
}

func TestSaveIsFencedBeforeAcquire(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	for _, epoch := range []uint64{0, 1} {
		if err := store.Save(t.Context(), offsets.Checkpoint{Epoch: epoch}); !errors.Is(err, offsets.ErrFenced) {
			t.Errorf("Save of epoch %d: %v, want ErrFenced", epoch, err)
		}
	}
}

func TestAClosedStoreSavesNothing(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	cp := acquire(t, store)
	closeStore(t, store)
	if err := store.Save(t.Context(), cp); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("Save: %v, want fs.ErrClosed", err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"lock"}) {
		t.Errorf("the directory holds %q", got)
	}
}

func TestACancelledContextStopsBeforeTheFirstStep(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	cp := acquire(t, store)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := store.Acquire(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Acquire: %v, want context.Canceled", err)
	}
	if err := store.Save(ctx, cp); !errors.Is(err, context.Canceled) {
		t.Errorf("Save: %v, want context.Canceled", err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"lock"}) {
		t.Errorf("the directory holds %q", got)
	}
}

func TestAWriteThatStopsHalfwayLeavesTheOldCheckpoint(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, savedSample(t))
	if out, err := helper(t, "save beyond the file size limit", dir).CombinedOutput(); err != nil {
		t.Fatalf("the helper fails: %v: %s", err, out)
	}
	cp, err := filestore.Read(dir)
	if diff := cmp.Diff(sample(), cp); err != nil || diff != "" {
		t.Errorf("Read: %v (-want +got):\n%s", err, diff)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"checkpoint", "lock"}) {
		t.Errorf("the directory holds %q, want no torn temporary file", got)
	}
}

func TestAFailedSaveLeavesTheOldCheckpointAndCanBeTriedAgain(t *testing.T) {
	dir := t.TempDir()
	save1(t, dir)
	store := open(t, dir)
	cp := acquire(t, store)
	obstacle := filepath.Join(dir, "checkpoint.tmp") // no file can take the place of a full directory
	if err := os.MkdirAll(filepath.Join(obstacle, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := store.Save(t.Context(), cp); !errors.Is(err, syscall.EISDIR) {
			t.Errorf("Save: %v, want EISDIR", err)
		}
		if old, err := filestore.Read(dir); err != nil || old.Epoch != 1 {
			t.Fatalf("Read = %+v, %v, want the old checkpoint", old, err)
		}
	}
	if err := os.RemoveAll(obstacle); err != nil {
		t.Fatal(err)
	}
	save(t, store, cp)
	if now, err := filestore.Read(dir); err != nil || now.Epoch != 2 {
		t.Errorf("Read = %+v, %v, want the new checkpoint", now, err)
	}
}

func TestAFailedRenameCanBeTriedAgain(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	cp := acquire(t, store)
	obstacle := filepath.Join(dir, "checkpoint")
	if err := os.MkdirAll(filepath.Join(obstacle, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := store.Save(t.Context(), cp); err == nil {
		t.Error("Save reports success and nothing was renamed")
	}
	if got := names(t, dir); !slices.Equal(got, []string{"checkpoint", "lock"}) {
		t.Errorf("the directory holds %q, want no temporary file", got)
	}
	if err := os.RemoveAll(obstacle); err != nil {
		t.Fatal(err)
	}
	save(t, store, cp)
	if now, err := filestore.Read(dir); err != nil || now.Epoch != 1 {
		t.Errorf("Read = %+v, %v, want the new checkpoint", now, err)
	}
}

func TestReadWhileSavingNeverSeesATornFile(t *testing.T) {
	const saves = 1_000
	dir := t.TempDir()
	store := open(t, dir)
	cp := sample()
	cp.Epoch = acquire(t, store).Epoch
	at := func(i uint64) offsets.Checkpoint {
		cp := cp
		cp.Pos = offsets.Position{LSN: offsets.LSN(i), Done: i}
		cp.Source.Scope = strings.Repeat("s", int(i%97)) // the length changes too
		return cp
	}
	save(t, store, at(0))

	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			last := uint64(0)
			for {
				got, err := filestore.Read(dir)
				if err != nil {
					t.Errorf("Read: %v", err)
					return
				}
				if diff := cmp.Diff(at(got.Pos.Done), got); diff != "" || got.Pos.Done < last {
					t.Errorf("Read checkpoint %d after %d (-want +got):\n%s", got.Pos.Done, last, diff)
					return
				}
				last = got.Pos.Done
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for i := range uint64(saves) {
		save(t, store, at(i+1))
	}
	close(stop)
	readers.Wait()
	if got, err := filestore.Read(dir); err != nil || got.Pos.Done != saves {
		t.Errorf("at last Read = %v, %v, want %d", got.Pos.Done, err, saves)
	}
}

func BenchmarkSave(b *testing.B) {
	dir := b.TempDir()
	store, err := filestore.Open(dir)
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	acquired, err := store.Acquire(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	cp := sample()
	cp.Epoch = acquired.Epoch
	b.ReportAllocs()
	for b.Loop() {
		cp.Pos.LSN++
		if err := store.Save(b.Context(), cp); err != nil {
			b.Fatal(err)
		}
	}
}
