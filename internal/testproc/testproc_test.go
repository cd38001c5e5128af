package testproc_test

import (
	"context"
	"errors"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cdcpub/cdcpub/internal/testproc"
)

const limit = 10 * time.Second

func start(t *testing.T, script string) *testproc.Process {
	t.Helper()
	p, err := testproc.Start(exec.Command("sh", "-c", script), syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := p.Stop(syscall.SIGKILL, limit); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestProgramThatIsNotThereCannotStart(t *testing.T) {
	if _, err := testproc.Start(exec.Command("/no/such/program"), syscall.SIGKILL); err == nil {
		t.Error("started")
	}
}

func TestReady(t *testing.T) {
	never := func(context.Context) error { return errors.New("no answer") }
	t.Run("returns once the probe succeeds", func(t *testing.T) {
		tries := 0
		err := start(t, "exec sleep 60").Ready(t.Context(), time.Millisecond, func(context.Context) error {
			if tries++; tries < 3 {
				return errors.New("not yet")
			}
			return nil
		})
		if err != nil || tries != 3 {
			t.Errorf("%d tries, error %v", tries, err)
		}
	})
	t.Run("says how a process ended that was never ready", func(t *testing.T) {
		err := start(t, "exit 3").Ready(t.Context(), time.Millisecond, never)
		if err == nil || !strings.Contains(err.Error(), "exit status 3") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("gives up with its context", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if err := start(t, "exec sleep 60").Ready(ctx, time.Millisecond, never); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

func TestStopOfAProcessThatDoesNotEndIsAnError(t *testing.T) {
	p := start(t, "exec sleep 60")
	const ignoredByDefault = syscall.SIGWINCH
	if _, err := p.Stop(ignoredByDefault, 20*time.Millisecond); err == nil {
		t.Error("no error")
	}
	if !p.Running() {
		t.Error("it ended")
	}
}

func TestUniqueNameFitsPostgresAndDiffers(t *testing.T) {
	const test = `TestA/Sub-Test_with "quotes", a long text and more and more and more`
	first, second := testproc.UniqueName(test), testproc.UniqueName(test)
	if first == second {
		t.Errorf("%s twice", first)
	}
	if !regexp.MustCompile(`^t_[a-z0-9_]{1,46}$`).MatchString(first) {
		t.Errorf("bad name %s", first)
	}
}

func TestRunWithoutLeaks(t *testing.T) {
	stop := make(chan struct{})
	defer close(stop)
	leak := func(code int) testproc.Runner {
		return testproc.RunnerFunc(func() int {
			go func() { <-stop }()
			return code
		})
	}
	if got := testproc.RunWithoutLeaks(leak(0)); got != 1 {
		t.Errorf("a leak after passed tests: exit code %d, want 1", got)
	}
	if got := testproc.RunWithoutLeaks(leak(2)); got != 2 {
		t.Errorf("a leak after failed tests: exit code %d, want theirs", got)
	}
}
