package main

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// envPrefix begins the name of every variable that is ours.
const envPrefix = "CDCPUB_"

// envBrokerURL sets publish.urls to a single URL, without YAML's brackets, and
// envBrokerURLFile is another name of publish.urls_file that goes with it.
const (
	envBrokerURL     = "CDCPUB_PUBLISH_URL"
	envBrokerURLFile = "CDCPUB_PUBLISH_URL_FILE"
)

func envName(path string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// loadEnv applies the CDCPUB_ variables. Names are made from the known keys and
// looked up: a name cannot be split back into a key, since keys hold
// underscores of their own.
func (l *loader) loadEnv(cfg *Config, environ []string) {
	keys := map[string]Key{}
	for _, k := range configKeys() {
		if k.index != nil {
			keys[envName(k.Path)] = k
		}
	}
	names, values := ownVariables(environ)
	for _, name := range names {
		l.where = func(*yaml.Node) string { return name }
		k, known := keys[name]
		future, planned := notBuiltVariable(name)
		switch {
		case known:
			l.forget(k.Path)
			l.setFromEnv(k, reflect.ValueOf(cfg).Elem().FieldByIndex(k.index), values[name])
		case name == envBrokerURL:
			if _, both := values[envName("publish.urls")]; both {
				l.addf(nil, "", "%s is set too; set one of the two", envName("publish.urls"))
				continue
			}
			l.forget("publish.urls")
			l.origin["publish.urls"] = name
			cfg.Publish.URLs = []string{values[name]}
		case name == envBrokerURLFile:
			if _, both := values[envName("publish.urls_file")]; both {
				l.addf(nil, "", "%s is set too; set one of the two", envName("publish.urls_file"))
				continue
			}
			l.forget("publish.urls_file")
			l.origin["publish.urls_file"] = name
			cfg.Publish.URLsFile = values[name]
		case planned:
			l.addf(nil, "", "%s is not built yet", future)
		default:
			l.addf(nil, "", "unknown variable%s", suggestVariable(name, keys))
		}
	}
}

// forget drops what is known of a key's value from the file, once the
// environment overrides it.
func (l *loader) forget(path string) {
	inside := func(key string) bool {
		rest, ok := strings.CutPrefix(key, path)
		return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
	}
	l.problems = slices.DeleteFunc(l.problems, func(p Problem) bool { return inside(p.Key) })
	maps.DeleteFunc(l.bad, func(key string, _ bool) bool { return inside(key) })
	maps.DeleteFunc(l.origin, func(key, _ string) bool { return inside(key) })
}

func (l *loader) setFromEnv(k Key, field reflect.Value, value string) {
	// Strings are taken as they are: a password must not need YAML's quoting.
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: value}
	if field.Kind() != reflect.String {
		var doc yaml.Node
		// The library's error is left out: the value may be a secret.
		if yaml.Unmarshal([]byte(value), &doc) == nil && doc.Kind == yaml.DocumentNode {
			n = doc.Content[0]
		}
	}
	l.decode(n, k.Path, field, k.field)
}

// ownVariables returns the CDCPUB_ variables of environ, names sorted. If a
// variable occurs twice the last one counts, as for os/exec.
func ownVariables(environ []string) (names []string, values map[string]string) {
	values = map[string]string{}
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, envPrefix) || foreignVariable(name) {
			continue
		}
		if _, seen := values[name]; !seen {
			names = append(names, name)
		}
		values[name] = value
	}
	slices.Sort(names)
	return names, values
}

// foreignVariable reports names with our prefix that others set: Kubernetes
// injects some into every pod for a Service named cdcpub
// (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables),
// and our own tests find their servers by others.
func foreignVariable(name string) bool {
	rest := strings.TrimPrefix(name, envPrefix)
	return rest == "PORT" || strings.HasPrefix(rest, "PORT_") || strings.HasPrefix(rest, "SERVICE_") ||
		strings.HasPrefix(rest, "TEST_")
}

// notBuiltVariable is notBuilt for the name of a variable.
func notBuiltVariable(name string) (key string, ok bool) {
	for _, key := range unbuiltKeys() {
		if name == envName(key) || strings.HasPrefix(name, envName(key)+"_") {
			return key, true
		}
	}
	return "", false
}

func suggestVariable(name string, keys map[string]Key) string {
	known := []string{envBrokerURL, envBrokerURLFile}
	for n := range keys {
		known = append(known, n)
	}
	slices.Sort(known) // so that the same mistake gets the same answer
	if s, ok := nearest(name, known); ok {
		return fmt.Sprintf("; did you mean %s?", s)
	}
	if strings.Contains(name, "_SERVICE_") || strings.Contains(name, "_PORT") {
		return "; if Kubernetes made it for a Service, set enableServiceLinks: false in the pod"
	}
	return "; variables are named after keys, as " + envName("source.dsn") + " is after source.dsn"
}
