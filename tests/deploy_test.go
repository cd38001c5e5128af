package tests

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/cdcpub/cdcpub/internal/pgtest"
	"github.com/cdcpub/cdcpub/internal/testproc"
)

// There is no Docker engine where these tests have to run. So what the image and
// the compose file consist of is taken from them and run without one.

// composeFile has every key that the compose file may use; others are an error.
type composeFile struct {
	Name     string
	Services map[string]composeService
	Networks map[string]struct{ Internal bool }
	Volumes  map[string]*struct{}
}

type composeService struct {
	Image       string
	Build       composeBuild
	Command     []string
	Environment map[string]string
	Hostname    string
	Profiles    []string
	Volumes     []string
	Networks    []string
	Ports       []string
	DependsOn   map[string]struct{ Condition string } `yaml:"depends_on"`
	Healthcheck *struct {
		Test              []string
		Interval, Timeout string
		Retries           int
	}
	Restart     string
	ReadOnly    bool     `yaml:"read_only"`
	CapDrop     []string `yaml:"cap_drop"`
	SecurityOpt []string `yaml:"security_opt"`
	StopGrace   string   `yaml:"stop_grace_period"`
}

// composeBuild is a context, or a context and a target.
type composeBuild struct{ Context, Target string }

func (b *composeBuild) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		return n.Decode(&b.Context)
	}
	type plain composeBuild
	return n.Decode((*plain)(b))
}

func readCompose(t *testing.T) composeFile {
	t.Helper()
	b, err := os.ReadFile("../docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	var c composeFile
	if err := dec.Decode(&c); err != nil {
		t.Fatal(err)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		t.Fatalf("more than one document: %v", err)
	}
	return c
}

// What the file refers to is there, and nothing but the status page can be reached
// from outside, on the loopback interface.
func TestComposeFileIsConsistent(t *testing.T) {
	t.Parallel()
	c := readCompose(t)
	stages := dockerfile(t).stages
	for name, s := range c.Services {
		if (s.Image == "") == (s.Build.Context == "") {
			t.Errorf("%s: want an image or a build", name)
		}
		if s.Build.Target != "" && !slices.Contains(stages, s.Build.Target) {
			t.Errorf("%s: the Dockerfile has no target %q", name, s.Build.Target)
		}
		if (s.Image == "") != slices.Equal(s.Profiles, []string{"events"}) {
			t.Errorf("%s: profiles %v: want the servers without, ours with events", name, s.Profiles)
		}
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			_, declared := c.Volumes[from]
			_, err := os.Stat(filepath.Join("..", from))
			if strings.HasPrefix(from, ".") && (err != nil || !strings.HasSuffix(v, ":ro")) || !strings.HasPrefix(from, ".") && !declared {
				t.Errorf("%s: volume %s: want a declared one, or a file that is there, mounted read-only", name, v)
			}
		}
		for _, n := range s.Networks {
			if _, ok := c.Networks[n]; !ok {
				t.Errorf("%s: there is no network %s", name, n)
			}
			if (n == "status") != (len(s.Ports) > 0 && n != "lab") {
				t.Errorf("%s: only who publishes a port is in a network that has a way out", name)
			}
		}
		for on, d := range s.DependsOn {
			other, ok := c.Services[on]
			if !ok || (d.Condition == "service_healthy") != (other.Healthcheck != nil) {
				t.Errorf("%s depends on %s (%s), which is not there or has no such health", name, on, d.Condition)
			}
		}
		if name != "cdcpub" && len(s.Ports) > 0 || name == "cdcpub" && !slices.Equal(s.Ports, []string{"127.0.0.1:7690:7690"}) {
			t.Errorf("%s publishes %v", name, s.Ports)
		}
	}
	if !c.Networks["lab"].Internal {
		t.Error("the network of the servers is not internal")
	}
	if c.Services["postgres"].Image != "postgres:18.6" || c.Services["rabbitmq"].Image != "rabbitmq:4.3.5-management" {
		t.Error("the servers' versions are not those that docs/docker.md names")
	}
}

// image is what the Dockerfile says.
type image struct {
	runs       []string // the commands of the build stage
	env        map[string]string
	user       string
	health     []string
	entrypoint []string
	cmd        []string
	stages     []string
	final      string // the last FROM
	copied     []string
}

func dockerfile(t *testing.T) image {
	t.Helper()
	b, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	i := image{env: map[string]string{}}
	list := func(s string) (words []string) {
		if err := json.Unmarshal([]byte(s), &words); err != nil {
			t.Fatalf("Dockerfile: %s: %v", s, err)
		}
		return words
	}
	for line := range strings.Lines(string(b)) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "", "#", "WORKDIR", "ARG", "EXPOSE", "VOLUME", "STOPSIGNAL":
		case "FROM":
			i.final, _, _ = strings.Cut(rest, " ")
			if _, stage, ok := strings.Cut(rest, " AS "); ok {
				i.stages = append(i.stages, stage)
			}
			i.copied = nil
		case "RUN":
			i.runs = append(i.runs, rest)
		case "COPY":
			i.copied = append(i.copied, rest)
		case "ENV":
			k, v, _ := strings.Cut(rest, "=")
			i.env[k] = v
		case "USER":
			i.user = rest
		case "HEALTHCHECK":
			_, rest, _ = strings.Cut(rest, "CMD ")
			i.health = list(rest)
		case "ENTRYPOINT":
			i.entrypoint = list(rest)
		case "CMD":
			i.cmd = list(rest)
		default:
			t.Fatalf("Dockerfile: unknown instruction %q", line)
		}
	}
	return i
}

// buildImage runs the build commands of the Dockerfile on the files that
// .dockerignore lets through, and returns where the results are.
func buildImage(t *testing.T, i image) string {
	t.Helper()
	b, err := os.ReadFile("../.dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	src, out := t.TempDir(), t.TempDir()
	for line := range strings.Lines(string(b)) {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "!")
		if !ok {
			continue
		}
		if msg, err := exec.Command("cp", "-R", filepath.Join("..", name), src).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", name, err, msg)
		}
	}
	if msg, err := exec.Command("find", src, "(", "-name", "*_test.go", "-o", "-name", "testdata", ")", "-exec", "rm", "-r", "{}", "+").CombinedOutput(); err != nil {
		t.Fatalf("leave out tests: %v: %s", err, msg)
	}
	for _, run := range i.runs {
		cmd := exec.Command("sh", "-c", strings.ReplaceAll(run, "/out", out))
		cmd.Dir, cmd.Env = src, append(os.Environ(), "VERSION=1.2.3", "GOFLAGS=-buildvcs=false")
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("RUN %s: %v\n%s", run, err, msg)
		}
	}
	return out
}

// On scratch there is no loader and no shell: the programs must be static, and
// what the image runs must be a command of them.
func TestDockerfileMakesStaticProgramsThatItsCommandsFit(t *testing.T) {
	t.Parallel()
	i := dockerfile(t)
	out := buildImage(t, i)
	for _, name := range []string{"cdcpub", "orders"} {
		f, err := elf.Open(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				t.Errorf("%s needs a loader", name)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	version, err := exec.Command(filepath.Join(out, "cdcpub"), "version").Output()
	if err != nil || string(version) != "cdcpub 1.2.3\n" {
		t.Errorf("version %q, %v", version, err)
	}
	if i.final != "scratch" || i.user != "65532:65532" || !slices.Equal(i.entrypoint, []string{"/cdcpub"}) || !slices.Equal(i.cmd, []string{"run"}) {
		t.Errorf("the image is %+v", i)
	}
	if !slices.ContainsFunc(i.copied, func(s string) bool { return strings.HasSuffix(s, " /etc/ssl/certs/ca-certificates.crt") }) {
		t.Error("the image has no certificate authorities")
	}
	if !slices.Equal(i.health, []string{"/cdcpub", "status", "--ready"}) {
		t.Fatalf("the health check is %q", i.health)
	}
}

// The compose file's own configuration, in the places that its image has, on
// servers that init.sql has set up: events reach the consumer and show in its log.
func TestComposeFileShowsMessages(t *testing.T) {
	t.Parallel()
	compose, img := readCompose(t), dockerfile(t)
	out := buildImage(t, img)
	pg, a := pgtest.Start(t), startAdmin(t)
	script, err := os.ReadFile("../deploy/compose/init.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range strings.Split(regexp.MustCompile(`(?m)^--.*$`).ReplaceAllString(string(script), ""), ";") {
		if s = strings.TrimSpace(s); s != "" {
			pgtest.Exec(t, pg.DSN("postgres"), s)
		}
	}
	requirePassword(t, pg, "lab")
	a.ctl(t, "add_user", "lab", "lab")
	a.ctl(t, "set_permissions", "-p", "/", "lab", ".*", ".*", ".*")
	port, err := testproc.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	here := strings.NewReplacer("postgres:5432", pg.Addr(), "rabbitmq:5672", a.rabbit.Addr())
	// program is a container's process, with the paths of the image below root.
	program := func(service string, args ...string) *exec.Cmd {
		s := compose.Services[service]
		name := "cdcpub"
		env := []string{"PATH=" + os.Getenv("PATH")}
		if s.Build.Target == "orders" {
			name = "orders"
		} else {
			for k, v := range img.env {
				env = append(env, k+"="+strings.NewReplacer("/var/lib", root, ":7690", "127.0.0.1:"+strconv.Itoa(port)).Replace(v))
			}
		}
		for k, v := range s.Environment {
			env = append(env, k+"="+here.Replace(v))
		}
		dir := t.TempDir()
		for _, v := range s.Volumes {
			from, to, _ := strings.Cut(strings.TrimSuffix(v, ":ro"), ":")
			if strings.HasPrefix(from, ".") {
				b, err := os.ReadFile(filepath.Join("..", from))
				if err != nil {
					t.Fatal(err)
				}
				writeFile(t, filepath.Join(dir, to), b)
			}
		}
		if len(args) == 0 {
			args = s.Command
		}
		if len(args) == 0 {
			args = img.cmd
		}
		cmd := exec.Command(filepath.Join(out, name), args...)
		cmd.Dir, cmd.Env = dir, env
		return cmd
	}
	if err := os.Mkdir(filepath.Join(root, "cdcpub"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range []*exec.Cmd{program("cdcpub", "config", "--validate"), program("init", "config", "--validate"), program("init")} {
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", cmd.Args[1:], err, msg)
		}
	}
	if program("cdcpub", img.health[1:]...).Run() == nil {
		t.Error("the health check is content although nothing runs")
	}
	log, err := os.Create(filepath.Join(root, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	for _, service := range []string{"consumer", "cdcpub", "service"} {
		cmd := program(service)
		cmd.Stdout, cmd.Stderr = log, log
		proc, err := testproc.Start(cmd, syscall.SIGKILL)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := proc.Stop(syscall.SIGTERM, 20*time.Second); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, time.Minute, "the consumer shows messages", func() bool {
		b, err := os.ReadFile(log.Name())
		return err == nil && strings.Count(string(b), "\ndelivered order ") >= 3
	})
	eventually(t, time.Minute, "the health check is content", func() bool { return program("cdcpub", img.health[1:]...).Run() == nil })
}
