// Package tests runs the real command against real servers and takes parts away
// from it. What it checks is decided by a ledger of its own: what was committed,
// read from PostgreSQL, and what arrived, read from the queue.
package tests

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/rabbittest"
	"github.com/cdcpub/cdcpub/internal/testproc"
)

// binaryVariable names the built command for the tests of this process.
const binaryVariable = "CDCPUB_TESTS_BINARY"

func TestMain(m *testing.M) {
	os.Exit(rabbittest.Main(pgtest.Wrap(withBinary(m))))
}

// withBinary builds the command once.
func withBinary(m testproc.Runner) testproc.Runner {
	return testproc.RunnerFunc(func() int {
		dir, err := os.MkdirTemp("", "cdcpub-tests-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary := filepath.Join(dir, "cdcpub")
		build := exec.CommandContext(context.Background(), "go", "build", "-o", binary, "../cmd/cdcpub")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		build.Stdout, build.Stderr = os.Stderr, os.Stderr
		if err := build.Run(); err != nil {
			fmt.Fprintln(os.Stderr, "build cdcpub:", err)
			return 1
		}
		if err := os.Setenv(binaryVariable, binary); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	})
}
