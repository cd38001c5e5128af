package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// defaultConfigFile is read from the working directory if it exists and no
// other file is named.
const defaultConfigFile = "cdcpub.yml"

// Problem is one thing that is wrong with the configuration. It never holds a
// secret.
type Problem struct {
	Where string // "cdcpub.yml:12" or the environment variable; empty: nowhere, a default
	Key   string // "relay.window"; empty: the file as a whole
	Text  string
	// also names the other keys that the problem is about.
	also []string
}

func (p Problem) String() string {
	var parts []string
	for _, s := range []string{p.Where, p.Key, p.Text} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, ": ")
}

// ConfigError holds every problem that was found, not only the first, so that
// one round of corrections is enough.
type ConfigError struct {
	Problems []Problem
}

// Error has one line for each problem.
func (e *ConfigError) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// LoadConfig returns the configuration: environment beats file beats default.
// An empty file name means ./cdcpub.yml if there is one. environ is in the form
// of os.Environ. The error is a *ConfigError.
func LoadConfig(file string, environ []string) (Config, error) {
	cfg, _, err := loadConfig(file, environ)
	return cfg, err
}

// loadConfig also says where each value was set: by key, without those that were
// not set at all.
func loadConfig(file string, environ []string) (Config, map[string]string, error) {
	l := loader{origin: map[string]string{}, bad: map[string]bool{}}
	cfg := NewConfig()
	l.loadFile(&cfg, file)
	l.loadEnv(&cfg, environ)
	for _, p := range cfg.Validate() {
		// A value that was refused has left the default in its place; what that
		// default then clashes with is noise.
		if !slices.ContainsFunc(append(p.also, p.Key), l.refused) {
			p.Where = l.whereSet(p)
			l.problems = append(l.problems, p)
		}
	}
	if len(l.problems) > 0 {
		return Config{}, nil, &ConfigError{Problems: l.problems}
	}
	return cfg, l.origin, nil
}

// loader collects problems while it fills a Config.
type loader struct {
	problems []Problem
	origin   map[string]string // leaf key -> where it was set last
	bad      map[string]bool   // leaf keys whose value was refused
	where    func(*yaml.Node) string
}

func (l *loader) addf(n *yaml.Node, key, format string, args ...any) {
	l.bad[key] = true
	l.problems = append(l.problems, Problem{Where: l.where(n), Key: key, Text: fmt.Sprintf(format, args...)})
}

// refused reports whether the value of key, or of a key around it, was refused.
func (l *loader) refused(key string) bool {
	for ; key != ""; key = parentPath(key) {
		if l.bad[key] {
			return true
		}
	}
	return false
}

// whereSet finds the place where a problem of values is best corrected: the
// first of its keys that was set at all, or else the list element that lacks it.
func (l *loader) whereSet(p Problem) string {
	for _, key := range append([]string{p.Key}, p.also...) {
		if where := l.origin[key]; where != "" {
			return where
		}
	}
	inList := strings.Contains(p.Key, "[")
	for key := p.Key; inList && key != ""; key = parentPath(key) {
		if where := l.origin[key]; where != "" {
			return where
		}
	}
	return ""
}

// parentPath turns a.b[2].c into a.b[2], that into a.b and that into a.
func parentPath(path string) string {
	return path[:max(strings.LastIndexAny(path, ".["), 0)]
}

func (l *loader) loadFile(cfg *Config, file string) {
	named := file != ""
	if !named {
		file = defaultConfigFile
	}
	data, err := os.ReadFile(file)
	if !named && errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		l.problems = append(l.problems, Problem{Text: fmt.Sprintf("read configuration: %v", err)})
		return
	}
	l.where = func(n *yaml.Node) string { return fmt.Sprintf("%s:%d", file, n.Line) }

	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return // an empty file: all defaults
	case err != nil:
		// The library's text names the line and the grammar, not the content.
		l.problems = append(l.problems, Problem{Where: file, Text: fmt.Sprintf("parse configuration: %v", err)})
		return
	}
	if err := dec.Decode(&second); !errors.Is(err, io.EOF) {
		l.problems = append(l.problems, Problem{Where: file, Text: "holds more than one YAML document; only one is read"})
	}
	root := doc.Content[0]
	if isNull(root) {
		return // nothing but comments
	}
	l.decode(root, "", reflect.ValueOf(cfg).Elem(), reflect.StructField{})
}

// decode fills v from n. f is the field that v belongs to, for its tags; the
// elements of a list share those of the list.
func (l *loader) decode(n *yaml.Node, path string, v reflect.Value, f reflect.StructField) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	l.origin[path] = l.where(n)
	var ok bool
	switch v.Kind() {
	case reflect.Struct:
		if ok = n.Kind == yaml.MappingNode; ok {
			l.decodeStruct(n, path, v)
		}
	case reflect.Map:
		if ok = n.Kind == yaml.MappingNode; ok {
			l.decodeMap(n, path, v, f)
		}
	case reflect.Slice:
		if ok = n.Kind == yaml.SequenceNode; ok {
			list := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
			for i, item := range n.Content {
				l.decode(item, fmt.Sprintf("%s[%d]", path, i), list.Index(i), f)
			}
			v.Set(list)
		}
	default:
		if ok = n.Kind == yaml.ScalarNode && !isNull(n); ok {
			l.decodeScalar(n, path, v, f)
		}
	}
	if !ok {
		l.addf(n, path, "expected %s, got %s", expected(v.Type(), f), describe(n, f))
	}
}

func (l *loader) decodeStruct(n *yaml.Node, path string, v reflect.Value) {
	fields := map[string]int{}
	for i := range v.NumField() {
		fields[yamlName(v.Type().Field(i))] = i
	}
	for _, e := range l.entries(n, path) {
		key := joinPath(path, e.name)
		i, known := fields[e.name]
		future, planned := notBuilt(key)
		switch {
		case known:
			l.decode(e.value, key, v.Field(i), v.Type().Field(i))
		case planned:
			l.addf(e.key, "", "%s is not built yet", future)
		default:
			l.addf(e.key, "", "unknown key %s%s", showKey(key), suggestKey(path, e.name))
		}
	}
}

func (l *loader) decodeMap(n *yaml.Node, path string, v reflect.Value, f reflect.StructField) {
	m := reflect.MakeMap(v.Type())
	for _, e := range l.entries(n, path) {
		value := reflect.New(v.Type().Elem()).Elem()
		l.decode(e.value, joinPath(path, showKey(e.name)), value, f)
		m.SetMapIndex(reflect.ValueOf(e.name), value)
	}
	v.Set(m)
}

type entry struct {
	key, value *yaml.Node
	name       string
}

// entries returns a mapping's entries without those that have no usable name.
// YAML's merge key is such a one: what it brings in would carry the wrong lines.
func (l *loader) entries(n *yaml.Node, path string) []entry {
	var list []entry
	first := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		line, seen := first[k.Value]
		switch {
		case k.Kind != yaml.ScalarNode || k.ShortTag() == "!!merge":
			l.addf(k, path, "expected a name as the key")
		case seen:
			l.addf(k, joinPath(path, showKey(k.Value)), "set twice; first on line %d", line)
		default:
			first[k.Value] = k.Line
			list = append(list, entry{key: k, value: n.Content[i+1], name: k.Value})
		}
	}
	return list
}

func (l *loader) decodeScalar(n *yaml.Node, path string, v reflect.Value, f reflect.StructField) {
	ok := false
	switch v.Type() {
	case reflect.TypeFor[time.Duration]():
		d, err := time.ParseDuration(n.Value)
		if ok = err == nil; ok {
			v.SetInt(int64(d))
		}
	case reflect.TypeFor[ByteSize]():
		b, err := ParseByteSize(n.Value)
		if ok = err == nil; ok {
			v.SetInt(int64(b))
		}
	default:
		ok = l.decodeBasic(n, path, v, f)
	}
	if !ok {
		l.addf(n, path, "expected %s, got %s", expected(v.Type(), f), describe(n, f))
	}
}

// decodeBasic goes by YAML's own idea of a scalar's type: a quoted "true" is a
// string, and 123 is not one.
func (l *loader) decodeBasic(n *yaml.Node, path string, v reflect.Value, f reflect.StructField) bool {
	switch v.Kind() {
	case reflect.String:
		if n.ShortTag() != "!!str" {
			return false
		}
		if unbuilt(f, n.Value) {
			l.addf(n, path, "%s is not built yet; possible is %s", show(n.Value), typeName(f))
			return true
		}
		if enum := f.Tag.Get("enum"); enum != "" && !slices.Contains(strings.Split(enum, ","), n.Value) {
			return false
		}
		v.SetString(n.Value)
		return true
	case reflect.Bool:
		b, err := strconv.ParseBool(n.Value)
		if n.ShortTag() != "!!bool" || err != nil {
			return false
		}
		v.SetBool(b)
		return true
	default:
		i, err := strconv.Atoi(n.Value)
		if n.ShortTag() != "!!int" || err != nil {
			return false
		}
		v.SetInt(int64(i))
		return true
	}
}

func unbuilt(f reflect.StructField, value string) bool {
	if f.Tag.Get("unbuilt") == "*" {
		return value != f.Tag.Get("enum")
	}
	return value != "" && value == f.Tag.Get("unbuilt")
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

func expected(t reflect.Type, f reflect.StructField) string {
	if t == f.Type {
		return typeName(f)
	}
	return goTypeName(t)
}

// describe says what stands in the file where something else was expected.
func describe(n *yaml.Node, f reflect.StructField) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "nothing; leave the key out for its default"
	case f.Tag.Get("secret") != "":
		return "another type (not shown: it may hold a secret)"
	case n.ShortTag() == "!!str":
		return show(n.Value)
	default:
		return fmt.Sprintf("%s, which YAML reads as %s", show(n.Value), strings.TrimPrefix(n.ShortTag(), "!!"))
	}
}

// show quotes a value for an error. A connection string may have slipped into
// any key by a wrong indentation, so what looks like one is not repeated.
func show(s string) string {
	if strings.Contains(s, "@") || strings.Contains(strings.ToLower(s), "password") {
		return "a value that is not shown since it may hold a secret"
	}
	return strconv.Quote(s)
}

// showKey is show for names: {amqp://user:secret@host} in place of a list is a
// mapping with that URL as its key.
func showKey(key string) string {
	if !regexp.MustCompile(`^[A-Za-z0-9_.\[\]-]{1,100}$`).MatchString(key) {
		return "(not shown: not a name)"
	}
	return key
}

// suggestKey ends an error about an unknown key. Keys beside it come first, and
// one of the same name elsewhere next: a wrong indentation is as likely as a
// wrong letter.
func suggestKey(parent, name string) string {
	var siblings, elsewhere []string
	for _, k := range configKeys() {
		rest, below := strings.CutPrefix(k.Path, listPath(parent)+".")
		if parent == "" {
			rest, below = k.Path, true
		}
		if below {
			sibling, _, _ := strings.Cut(rest, ".")
			sibling, _, _ = strings.Cut(sibling, "[")
			if !slices.Contains(siblings, sibling) {
				siblings = append(siblings, sibling)
			}
		}
		if k.index != nil && k.Path[strings.LastIndex(k.Path, ".")+1:] == name {
			elsewhere = append(elsewhere, k.Path)
		}
	}
	if s, ok := nearest(name, siblings); ok {
		return fmt.Sprintf("; did you mean %s?", joinPath(parent, s))
	}
	if len(elsewhere) > 0 {
		return fmt.Sprintf("; did you mean %s?", strings.Join(elsewhere, " or "))
	}
	return "; known here: " + strings.Join(siblings, ", ")
}

// listPath replaces the indexes in a path by the [] of the table of keys.
func listPath(path string) string {
	return regexp.MustCompile(`\[\d+\]`).ReplaceAllString(path, "[]")
}
