package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

// findBinaries looks where Debian and Ubuntu put the server's programs, which are
// not on the PATH because several major versions may be installed.
func findBinaries() (string, error) {
	const variable = "CDCPUB_TEST_PG_BIN"
	if bin := os.Getenv(variable); bin != "" {
		if _, err := os.Stat(filepath.Join(bin, "initdb")); err != nil {
			return "", fmt.Errorf("find PostgreSQL in %s: %w", variable, err)
		}
		return bin, nil
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil {
		return "", fmt.Errorf("find PostgreSQL: %w", err)
	}
	newest, bin := 0, ""
	for _, initdb := range found {
		dir := filepath.Dir(initdb)
		// Up to 9.6 a directory's name had two parts; those servers are too old anyway.
		version, err := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		if err == nil && version > newest {
			newest, bin = version, dir
		}
	}
	if bin == "" {
		return "", fmt.Errorf("no PostgreSQL server is installed: run scripts/setup, or set %s", variable)
	}
	return bin, nil
}

// serverOwner says as whom to run the server: as root it refuses. The user
// postgres comes with the packages; nobody does for servers from elsewhere.
func serverOwner() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		u, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, fmt.Errorf("find a user to run PostgreSQL as: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("read user ID of %s: %w", u.Username, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("read group ID of %s: %w", u.Username, err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// makeDir makes a directory that owner can use. It also holds the socket, whose
// path the kernel limits to 107 bytes, so a long or private TMPDIR, such as that
// of a test with t.TempDir, gives way to /tmp.
func makeDir(owner *syscall.Credential) (string, error) {
	const longest = 107 - len("/cdcpub-pg-0123456789/.s.PGSQL.65535")
	parent, err := filepath.Abs(os.TempDir())
	if err != nil {
		return "", fmt.Errorf("find temporary directory: %w", err)
	}
	if len(parent) > longest || (owner != nil && !reachable(parent)) {
		parent = "/tmp"
	}
	dir, err := os.MkdirTemp(parent, "cdcpub-pg-")
	if err != nil {
		return "", fmt.Errorf("make directory for PostgreSQL: %w", err)
	}
	if owner != nil {
		if err := os.Chown(dir, int(owner.Uid), int(owner.Gid)); err != nil {
			return "", fmt.Errorf("give directory to PostgreSQL's user: %w", errors.Join(err, os.RemoveAll(dir)))
		}
	}
	return dir, nil
}

// reachable reports whether every user may pass through dir and its parents.
func reachable(dir string) bool {
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return true
		}
		dir = parent
	}
}

// killTree kills the postmaster and its children. They are not in one process
// group (each child calls setsid), and a new postmaster refuses the data directory
// while an old child is attached to the shared memory, so it waits for them too.
func killTree(postmaster *testproc.Process) error {
	if !postmaster.Running() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	// Once stopped, it neither starts children nor reacts to the death of one.
	if err := postmaster.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if err := awaitState(ctx, postmaster.PID(), 'T'); err != nil {
		return err
	}
	children, err := childrenOf(postmaster.PID())
	if err != nil {
		return err
	}
	if _, err := postmaster.Stop(syscall.SIGKILL, stopLimit); err != nil {
		return err
	}
	for _, pid := range children {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
	}
	for _, pid := range children {
		if err := awaitState(ctx, pid, stateZombie); err != nil {
			return err
		}
	}
	return nil
}

// childrenOf reads the parents of all processes.
func childrenOf(parent int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if _, ppid, err := processState(pid); err == nil && ppid == parent {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// stateZombie is the state of a process that has ended. It holds no memory any
// more, and in a container perhaps nobody ever reaps it.
const stateZombie = 'Z'

// awaitState waits until a process, not necessarily a child of this one, is in a
// state of proc(5), or gone.
func awaitState(ctx context.Context, pid int, want byte) error {
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for {
		state, _, err := processState(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || state == want || state == stateZombie {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for state %c of process %d: %w", want, pid, ctx.Err())
		}
	}
}

// processState reads state and parent from /proc/PID/stat. They follow the
// program's name, which stands in parentheses and may itself contain any.
func processState(pid int) (state byte, parent int, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 2 {
		return 0, 0, fmt.Errorf("read /proc/%d/stat: %q", pid, b)
	}
	parent, err = strconv.Atoi(string(fields[1]))
	return fields[0][0], parent, err
}
