package filestore_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cdcpub/cdcpub/offsets"
	"github.com/cdcpub/cdcpub/offsets/filestore"
)

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
	for name, dir := range map[string]string{
		"the parent is missing, as when a volume is not mounted": filepath.Join(base, "volume", "state"),
		"the path is a file":   file,
		"the parent is a file": filepath.Join(file, "state"),
	} {
		t.Run(name, func(t *testing.T) {
			if store, err := filestore.Open(dir); err == nil || !strings.Contains(err.Error(), dir) {
				t.Errorf("Open = %v, %v, want an error that names %s", store, err, dir)
			}
		})
	}
	if got := names(t, base); !slices.Equal(got, []string{"file"}) {
		t.Errorf("the failed Open made %q", got)
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
	// A longer entry of a holder long dead must not show through.
	if err := os.WriteFile(filepath.Join(dir, "lock"), []byte("1234567890123\n12\n"), 0o600); err != nil {
		t.Fatal(err)
	}
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
	if got := string(read(t, dir, "lock")); got != strconv.Itoa(os.Getpid())+"\n" {
		t.Errorf("the lock file holds %q, want the pid of this process", got)
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
