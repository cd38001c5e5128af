package filestore_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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

func TestACheckpointSurvivesARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	store := open(t, dir)
	cp := acquire(t, store)
	if diff := cmp.Diff(offsets.Checkpoint{Epoch: 1}, cp); diff != "" {
		t.Fatalf("the first Acquire (-want +got):\n%s", diff)
	}
	want := sample()
	want.Epoch = 1
	save(t, store, want)
	closeStore(t, store)

	got, err := filestore.Read(dir)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Fatalf("Read: %v (-want +got):\n%s", err, diff)
	}
	store = open(t, dir)
	want.Epoch = 2
	if diff := cmp.Diff(want, acquire(t, store)); diff != "" {
		t.Fatalf("Acquire after the restart (-want +got):\n%s", diff)
	}
}

func TestAnEpochIsClaimedForGoodByTheFirstSave(t *testing.T) {
	dir := t.TempDir()
	for start := range 3 { // each process dies before it saves
		store := open(t, dir)
		if cp := acquire(t, store); cp.Epoch != 1 {
			t.Fatalf("start %d has epoch %d, want 1", start, cp.Epoch)
		}
		closeStore(t, store)
	}
	for want := range uint64(3) {
		store := open(t, dir)
		cp := acquire(t, store)
		if cp.Epoch != want+1 {
			t.Fatalf("epoch %d, want %d", cp.Epoch, want+1)
		}
		save(t, store, cp)
		save(t, store, cp)
		closeStore(t, store)
	}
}

func TestOpenMakesItsDirectoryAndFilesPrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	store := open(t, dir)
	if got := names(t, dir); !slices.Equal(got, []string{"lock"}) {
		t.Errorf("after Open the directory holds %q, want the lock only", got)
	}
	save(t, store, acquire(t, store))
	if got := names(t, dir); !slices.Equal(got, []string{"checkpoint", "lock"}) {
		t.Errorf("after Save the directory holds %q", got)
	}
	for path, want := range map[string]fs.FileMode{
		dir:                              fs.ModeDir | 0o700,
		filepath.Join(dir, "lock"):       0o600,
		filepath.Join(dir, "checkpoint"): 0o600,
	} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
		}
	}
}

func TestOpenTakesADirectoryWithTheModeThatItHas(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil { // as Kubernetes makes an emptyDir
		t.Fatal(err)
	}
	save1(t, dir)
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o777 {
		t.Errorf("the mode was changed to %v", info.Mode())
	}
}

func TestOpenFailsWithoutAUsableDirectory(t *testing.T) {
	base := t.TempDir()
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		dir  string
		want error
	}{
		"the parent is missing, as when a volume is not mounted": {filepath.Join(base, "volume", "state"), fs.ErrNotExist},
		"the path is a file":   {file, syscall.ENOTDIR},
		"the parent is a file": {filepath.Join(file, "state"), syscall.ENOTDIR},
	} {
		t.Run(name, func(t *testing.T) {
			if store, err := filestore.Open(c.dir); !errors.Is(err, c.want) {
				t.Errorf("Open = %v, %v, want %v", store, err, c.want)
			}
		})
	}
}

func TestReadTellsNothingSavedFromAMissingDirectory(t *testing.T) {
	dir := t.TempDir()
	if cp, err := filestore.Read(dir); err != nil || !cmp.Equal(cp, offsets.Checkpoint{}) {
		t.Errorf("Read of an empty directory = %+v, %v, want nothing", cp, err)
	}
	if _, err := filestore.Read(filepath.Join(dir, "typo")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read of a missing directory: %v, want fs.ErrNotExist", err)
	}
}

func TestALeftoverOfACrashedSaveIsIgnoredAndOverwritten(t *testing.T) {
	good := savedSample(t)
	for name, leftover := range map[string][]byte{
		"empty":             {},
		"torn":              good[:len(good)/2],
		"whole":             good,
		"longer than a new": append(good, make([]byte, 10_000)...),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "checkpoint.tmp"), leftover, 0o600); err != nil {
				t.Fatal(err)
			}
			if cp, err := filestore.Read(dir); err != nil || cp.Epoch != 0 {
				t.Fatalf("Read = %+v, %v, want nothing", cp, err)
			}
			store := open(t, dir)
			save(t, store, acquire(t, store))
			if cp, err := filestore.Read(dir); err != nil || cp.Epoch != 1 {
				t.Fatalf("Read = %+v, %v, want epoch 1", cp, err)
			}
			if got := names(t, dir); !slices.Equal(got, []string{"checkpoint", "lock"}) {
				t.Errorf("the directory holds %q", got)
			}
		})
	}
}

func TestOneProcessHoldsTheLock(t *testing.T) {
	dir := t.TempDir()
	pid, kill := startHolder(t, dir)
	_, err := filestore.Open(dir)
	var locked *filestore.LockedError
	if !errors.As(err, &locked) || locked.PID != pid || locked.Dir != dir {
		t.Fatalf("Open: %v, want a LockedError with pid %d", err, pid)
	}
	want := "open state directory: state directory " + dir + " is in use by process " + strconv.Itoa(pid)
	if err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}

	kill() // the kernel frees the lock; the file with the dead pid stays
	store := open(t, dir)
	if got := strings.TrimSpace(string(read(t, dir, "lock"))); got != strconv.Itoa(os.Getpid()) {
		t.Errorf("the lock file names %q, want this process", got)
	}
	closeStore(t, store)
	closeStore(t, open(t, dir))
}

func TestTheLockHoldsWithinAProcessToo(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	var locked *filestore.LockedError
	if _, err := filestore.Open(dir); !errors.As(err, &locked) || locked.PID != os.Getpid() {
		t.Fatalf("a second Open: %v, want a LockedError with pid %d", err, os.Getpid())
	}
	save(t, store, acquire(t, store)) // the attempt did the holder no harm
}

func TestALockFileWithoutAPIDIsReportedWithout(t *testing.T) {
	for name, content := range map[string]string{
		"empty":     "",
		"garbage":   "x\n",
		"oversized": strings.Repeat("9", 1_000),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "lock")
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
				t.Fatal(err)
			}
			_, err = filestore.Open(dir)
			var locked *filestore.LockedError
			if !errors.As(err, &locked) || locked.PID != 0 || !strings.HasSuffix(err.Error(), "by another process") {
				t.Errorf("Open: %v, want a LockedError without a pid", err)
			}
		})
	}
}

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
	for name, c := range map[string]struct {
		inTheWay string // a directory of this name, which no file can replace
		old      string // the checkpoint to hide meanwhile
		want     error
	}{
		"the temporary file cannot be created": {inTheWay: "checkpoint.tmp", want: syscall.EISDIR},
		"the rename fails":                     {inTheWay: "checkpoint", old: "checkpoint", want: fs.ErrExist},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			save1(t, dir)
			store := open(t, dir)
			cp := acquire(t, store)
			hidden := filepath.Join(t.TempDir(), "hidden")
			if c.old != "" {
				move(t, filepath.Join(dir, c.old), hidden)
			}
			obstacle := filepath.Join(dir, c.inTheWay)
			if err := os.MkdirAll(filepath.Join(obstacle, "full"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := store.Save(t.Context(), cp); !errors.Is(err, c.want) {
				t.Errorf("Save: %v, want %v", err, c.want)
			}
			if err := os.RemoveAll(obstacle); err != nil {
				t.Fatal(err)
			}
			if c.old != "" {
				move(t, hidden, filepath.Join(dir, c.old))
			}
			if old, err := filestore.Read(dir); err != nil || old.Epoch != 1 {
				t.Fatalf("Read = %+v, %v, want the old checkpoint", old, err)
			}
			save(t, store, cp)
			if now, err := filestore.Read(dir); err != nil || now.Epoch != 2 {
				t.Errorf("Read = %+v, %v, want the new checkpoint", now, err)
			}
		})
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

func TestRemoveDeletesWhatThisPackageMade(t *testing.T) {
	for name, c := range map[string]struct {
		foreign string // somebody's file in the directory
		want    []string
	}{
		"and the directory when it is then empty": {want: nil},
		"and leaves the directory of other files": {foreign: "notes.txt", want: []string{"state/", "state/notes.txt"}},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			dir := filepath.Join(base, "state")
			save1(t, dir)
			for _, file := range []string{"checkpoint.tmp", c.foreign} {
				if file != "" {
					if err := os.WriteFile(filepath.Join(dir, file), nil, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			store, err := filestore.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := store.Remove(); err != nil {
				t.Fatal(err)
			}
			var got []string
			for path := range tree(t, base) {
				got = append(got, path)
			}
			slices.Sort(got)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("left (-want +got):\n%s", diff)
			}
			again := open(t, dir) // the lock is free, and nothing is remembered
			if cp := acquire(t, again); cp.Epoch != 1 {
				t.Errorf("epoch %d after Remove, want 1", cp.Epoch)
			}
		})
	}
}

func TestRemoveSparesTheStateOfAnotherProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	store, err := filestore.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	move(t, dir, dir+".old")
	save1(t, dir)
	if err := store.Remove(); !errors.Is(err, offsets.ErrFenced) {
		t.Errorf("Remove: %v, want ErrFenced", err)
	}
	if cp, err := filestore.Read(dir); err != nil || cp.Epoch != 1 {
		t.Errorf("Read = %+v, %v, want the other's checkpoint", cp, err)
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

// open returns a store that the test's end closes, if the test has not.
func open(t *testing.T, dir string) *filestore.Store {
	t.Helper()
	store, err := filestore.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return store
}

func acquire(t *testing.T, store *filestore.Store) offsets.Checkpoint {
	t.Helper()
	cp, err := store.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return cp
}

func save(t *testing.T, store *filestore.Store, cp offsets.Checkpoint) {
	t.Helper()
	if err := store.Save(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
}

func closeStore(t *testing.T, store *filestore.Store) {
	t.Helper()
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

// save1 is a whole short life of a connector that leaves a checkpoint of epoch 1.
func save1(t *testing.T, dir string) {
	t.Helper()
	store := open(t, dir)
	save(t, store, acquire(t, store))
	closeStore(t, store)
}

func move(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// tree returns the content of every file below base; directories end in a slash.
func tree(t *testing.T, base string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(base, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == base {
			return err
		}
		name, err := filepath.Rel(base, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			files[name+"/"] = ""
			return nil
		}
		data, err := os.ReadFile(path)
		files[name] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}
