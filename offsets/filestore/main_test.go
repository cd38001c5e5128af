package filestore_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/cdcpub/cdcpub/offsets/filestore"
)

// A flock ends with its process and RLIMIT_FSIZE holds for a whole process, so
// some tests need a second one: this test binary, started again with the name of
// what it shall do in helperEnv and a state directory in dirEnv.
const (
	helperEnv = "FILESTORE_TEST_HELPER"
	dirEnv    = "FILESTORE_TEST_DIR"
)

func TestMain(m *testing.M) {
	var err error
	switch helper := os.Getenv(helperEnv); helper {
	case "":
		goleak.VerifyTestMain(m)
		return
	case "hold the lock":
		err = holdTheLock(os.Getenv(dirEnv))
	case "save beyond the file size limit":
		err = saveBeyondTheLimit(os.Getenv(dirEnv))
	default:
		err = fmt.Errorf("unknown helper %q", helper)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// holdTheLock says "held" and keeps the lock until its standard input ends or it
// is killed.
func holdTheLock(dir string) error {
	if _, err := filestore.Open(dir); err != nil {
		return err
	}
	fmt.Println("held")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// saveBeyondTheLimit fails a write as a full disk does: after a part of it.
func saveBeyondTheLimit(dir string) error {
	signal.Ignore(syscall.SIGXFSZ)
	store, err := filestore.Open(dir)
	if err != nil {
		return err
	}
	cp, err := store.Acquire(context.Background())
	if err != nil {
		return err
	}
	limit := syscall.Rlimit{Cur: 100, Max: 100}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		return err
	}
	if err := store.Save(context.Background(), cp); !errors.Is(err, syscall.EFBIG) {
		return fmt.Errorf("Save: %w, want EFBIG", err)
	}
	return store.Close()
}

// startHolder starts a process that holds the lock on dir and returns its pid
// and a function that kills it as a crash would, which is safe to call twice.
func startHolder(t *testing.T, dir string) (pid int, kill func()) {
	t.Helper()
	cmd := helper(t, "hold the lock", dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	kill = func() {
		if !killed {
			killed = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = stdin.Close()
		}
	}
	t.Cleanup(kill)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != "held" {
		t.Fatalf("the helper says %q, %v", line, err)
	}
	return cmd.Process.Pid, kill
}

func helper(t *testing.T, name, dir string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), helperEnv+"="+name, dirEnv+"="+dir)
	return cmd
}
