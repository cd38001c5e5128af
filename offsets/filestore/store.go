// Package filestore keeps a connector's checkpoint in a directory of its own.
//
// The directory holds "checkpoint", the state; "lock", which one process at a
// time holds with flock(2) and which names that process; and for moments
// "checkpoint.tmp". All three have mode 0600. The directory must be on a file
// system that a crash of the machine leaves with what was fsynced, and that
// supports flock: any local one, and NFS version 4.
//
// Open creates the directory with mode 0700. A directory that exists is used
// with the mode that it has: container platforms hand out volumes that are
// writable for a group or for all (Kubernetes fsGroup, emptyDir) and set the
// mode again at every start, so to refuse it would stop a working connector,
// and to change it is not ours. Whoever may write to the directory can take the
// state away; that is noticed (ErrFenced) and not prevented.
package filestore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/cdcpub/cdcpub/offsets"
)

const (
	checkpointName = "checkpoint"
	tempName       = "checkpoint.tmp"
	lockName       = "lock"
)

// LockedError says that another process has the directory open.
type LockedError struct {
	Dir string
	PID int // as its own process namespace numbers it; 0 when the lock file does not tell
}

func (e *LockedError) Error() string {
	holder := "another process"
	if e.PID != 0 {
		holder = fmt.Sprintf("process %d", e.PID)
	}
	return fmt.Sprintf("state directory %s is in use by %s", e.Dir, holder)
}

// Store is an open and locked directory. One goroutine at a time may use it.
type Store struct {
	path string
	// root stays on the directory that was opened: whatever takes its place at
	// path, Save cannot write into it.
	root  *os.Root
	lock  *os.File
	epoch uint64 // 0 before Acquire
}

// Open locks the directory, without waiting, and creates it when it is missing.
// Its parent must exist: a mistyped path or a volume that is not mounted must not
// look like a connector that never ran. Open does not touch the checkpoint.
// While another process holds the lock the error is a *LockedError.
func Open(dir string) (*Store, error) {
	s, err := open(dir)
	if err != nil {
		return nil, fmt.Errorf("open state directory: %w", err)
	}
	return s, nil
}

func open(dir string) (*Store, error) {
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		// The files in it are fsynced in vain if the directory itself is lost.
		if err := syncDir(os.Open(filepath.Dir(filepath.Clean(dir)))); err != nil {
			return nil, err
		}
	case !errors.Is(err, fs.ErrExist):
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{path: dir, root: root}
	if err := s.takeLock(); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return s, nil
}

func (s *Store) takeLock() error {
	for {
		lock, err := s.root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		switch err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
		case errors.Is(err, syscall.EWOULDBLOCK):
			locked := &LockedError{Dir: s.path, PID: holder(lock)}
			return errors.Join(locked, lock.Close())
		case err != nil:
			return errors.Join(&fs.PathError{Op: "flock", Path: lock.Name(), Err: err}, lock.Close())
		}
		s.lock = lock
		// Between our open and our flock a teardown may have deleted the file: the
		// next process would then lock another one of the same name.
		if held, err := s.held(); err != nil {
			return errors.Join(err, lock.Close())
		} else if held {
			break
		}
		if err := lock.Close(); err != nil {
			return err
		}
	}
	// Written over and then cut, so that who reads it meanwhile finds one pid or
	// the other in the first line.
	pid := fmt.Appendf(nil, "%d\n", os.Getpid())
	_, err := s.lock.WriteAt(pid, 0)
	if err == nil {
		err = s.lock.Truncate(int64(len(pid)))
	}
	if err != nil {
		return errors.Join(err, s.lock.Close())
	}
	return nil
}

// holder returns the pid in a lock file, 0 if there is none: its holder may be
// about to write it.
func holder(lock io.Reader) int {
	b, err := io.ReadAll(io.LimitReader(lock, 32))
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		return 0
	}
	return pid
}

// held reports whether the lock file at the directory's path is the one that s
// has locked. It is another or none after the directory was swapped, restored
// from a backup or deleted, and then another process may hold that one.
func (s *Store) held() (bool, error) {
	ours, err := s.lock.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(filepath.Join(s.path, lockName))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return os.SameFile(ours, there), nil
}

// Acquire reads the checkpoint and claims the next epoch for s, which is the
// epoch of the checkpoint that it returns. The claim is durable with the first
// Save. When nothing was ever saved the checkpoint is empty but for its epoch. A
// file that cannot be trusted is a *CorruptError or a *VersionError.
func (s *Store) Acquire(ctx context.Context) (offsets.Checkpoint, error) {
	cp, err := s.acquire(ctx)
	if err != nil {
		return offsets.Checkpoint{}, fmt.Errorf("acquire checkpoint: %w", err)
	}
	return cp, nil
}

func (s *Store) acquire(ctx context.Context) (offsets.Checkpoint, error) {
	if err := ctx.Err(); err != nil {
		return offsets.Checkpoint{}, err
	}
	data, err := s.root.ReadFile(checkpointName)
	var cp offsets.Checkpoint
	switch {
	case err == nil:
		if cp, err = decode(filepath.Join(s.path, checkpointName), data); err != nil {
			return offsets.Checkpoint{}, err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return offsets.Checkpoint{}, err
	}
	cp.Epoch++
	s.epoch = cp.Epoch
	return cp, nil
}

// Save makes cp the checkpoint; when it returns nil, cp survives a crash of the
// machine. It blocks for two fsyncs and looks at ctx only before it begins. The
// error is ErrFenced when cp's epoch is not the one that s has acquired, or when
// the directory is no longer the one that s has locked. After any other error, a
// full disk for one, the last checkpoint is still there, or already cp if only
// the fsync of the directory failed, and Save may be tried again.
func (s *Store) Save(ctx context.Context, cp offsets.Checkpoint) error {
	if err := s.save(ctx, cp); err != nil {
		return fmt.Errorf("save checkpoint: %w", err)
	}
	return nil
}

func (s *Store) save(ctx context.Context, cp offsets.Checkpoint) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.epoch == 0 || cp.Epoch != s.epoch {
		return fmt.Errorf("epoch %d, acquired %d: %w", cp.Epoch, s.epoch, offsets.ErrFenced)
	}
	if err := s.fence(); err != nil {
		return err
	}
	data, err := encode(cp)
	if err != nil {
		return err
	}
	err = s.writeTemp(data)
	if err == nil {
		err = s.root.Rename(tempName, checkpointName)
	}
	if err != nil {
		// Best effort, to give a full disk its bytes back: the next Save
		// overwrites what stays.
		_ = s.root.Remove(tempName)
		return err
	}
	return syncDir(s.root.Open("."))
}

// fence returns ErrFenced when the directory at the path is not ours any more.
func (s *Store) fence() error {
	held, err := s.held()
	if err == nil && !held {
		err = fmt.Errorf("%s was replaced or deleted: %w", filepath.Join(s.path, lockName), offsets.ErrFenced)
	}
	return err
}

// writeTemp fsyncs before the rename: otherwise a crash of the machine may leave
// the new name with the content of neither checkpoint. After a failed fsync the
// kernel may have dropped the pages and call the next one a success (LWN 752063),
// so a retry writes everything anew.
func (s *Store) writeTemp(data []byte) error {
	f, err := s.root.OpenFile(tempName, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return errors.Join(err, f.Close())
	}
	return errors.Join(f.Sync(), f.Close())
}

// syncDir makes the names in a directory durable and closes it. It takes the
// result of an Open.
func syncDir(dir *os.File, err error) error {
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Close gives the lock back. The lock file stays: to delete it would let two
// processes lock two files of the same name.
func (s *Store) Close() error {
	if err := errors.Join(s.lock.Close(), s.root.Close()); err != nil {
		return fmt.Errorf("close state directory: %w", err)
	}
	return nil
}

// Remove deletes the checkpoint and the other files that this package made, and
// closes s in any case. The directory goes too if it is then empty and may be
// removed, which the root of a volume may not. The error is ErrFenced when the
// directory is no longer the one that s has locked.
func (s *Store) Remove() error {
	if err := errors.Join(s.remove(), s.lock.Close(), s.root.Close()); err != nil {
		return fmt.Errorf("remove state: %w", err)
	}
	// Not os.Remove, which would delete a file that has taken the path meanwhile.
	_ = syscall.Rmdir(s.path) // a directory that stays does no harm
	return nil
}

func (s *Store) remove() error {
	if err := s.fence(); err != nil {
		return err
	}
	// The lock goes last: until then nobody else begins to use the directory.
	for _, name := range []string{tempName, checkpointName, lockName} {
		if err := s.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return syncDir(s.root.Open("."))
}

// Read returns the checkpoint that was saved last, without the lock: it serves
// to look at a connector while it runs. The checkpoint is empty when nothing was
// ever saved in the directory; a directory that does not exist is an error
// (fs.ErrNotExist). Otherwise the errors are those of Acquire.
func Read(dir string) (offsets.Checkpoint, error) {
	cp, err := read(dir)
	if err != nil {
		return offsets.Checkpoint{}, fmt.Errorf("read checkpoint: %w", err)
	}
	return cp, nil
}

func read(dir string) (offsets.Checkpoint, error) {
	path := filepath.Join(dir, checkpointName)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		_, err := os.Stat(dir)
		return offsets.Checkpoint{}, err
	}
	if err != nil {
		return offsets.Checkpoint{}, err
	}
	return decode(path, data)
}
