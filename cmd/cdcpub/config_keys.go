package main

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Key describes one leaf key of the configuration.
type Key struct {
	Path    string // "relay.window"; "[]" stands for an element of a list
	Type    string // for people, as in "expected a ..."
	Default string // as it would be written in the file; empty: none
	Doc     string
	// index leads to the field from Config; nil for keys inside a list, which
	// the environment can only set as part of the list.
	index []int
	field reflect.StructField
}

// configKeys lists every leaf key in the order of the structs. Documentation,
// environment and suggestions all derive from it, so none of them can lag
// behind the structs.
func configKeys() []Key {
	cfg := NewConfig()
	return appendKeys(nil, "", []int{}, reflect.ValueOf(cfg))
}

func appendKeys(keys []Key, prefix string, index []int, v reflect.Value) []Key {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		path := joinPath(prefix, yamlName(f))
		var at []int
		if index != nil {
			at = append(slices.Clone(index), i)
		}
		switch {
		case f.Type.Kind() == reflect.Struct:
			keys = appendKeys(keys, path, at, v.Field(i))
		default:
			keys = append(keys, Key{
				Path: path, Type: typeName(f), Default: formatValue(v.Field(i)), Doc: f.Tag.Get("doc"), index: at, field: f,
			})
			if isList(f.Type) && f.Type.Elem().Kind() == reflect.Struct {
				keys = appendKeys(keys, path+"[]", nil, reflect.Zero(f.Type.Elem()))
			}
		}
	}
	return keys
}

func yamlName(f reflect.StructField) string { return f.Tag.Get("yaml") }

func isList(t reflect.Type) bool { return t.Kind() == reflect.Slice }

func joinPath(prefix, name string) string {
	if prefix == "" {
		return name
	}
	return prefix + "." + name
}

// typeName says what a key expects, so that it reads well after "expected".
func typeName(f reflect.StructField) string {
	if enum := f.Tag.Get("enum"); enum != "" {
		return strings.ReplaceAll(enum, ",", " or ")
	}
	return goTypeName(f.Type)
}

func goTypeName(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[time.Duration]():
		return "a duration such as 60s"
	case reflect.TypeFor[ByteSize]():
		return "a size such as 32MiB"
	}
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Struct {
			return "a list of mappings"
		}
		return "a list of strings"
	case reflect.Map:
		return "a mapping of names to strings"
	case reflect.Struct:
		return "a mapping"
	default:
		panic("configuration field of unsupported type " + t.String())
	}
}

// formatValue prints a default as the file would have it. Lists are the flow
// form that the environment takes too.
func formatValue(v reflect.Value) string {
	switch {
	case v.Kind() == reflect.Map && v.Len() == 0:
		return "{}"
	case isList(v.Type()):
		var parts []string
		for i := range v.Len() {
			parts = append(parts, formatValue(v.Index(i)))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case v.Kind() == reflect.Struct:
		var parts []string
		for i := range v.NumField() {
			if !v.Field(i).IsZero() {
				parts = append(parts, yamlName(v.Type().Field(i))+": "+formatValue(v.Field(i)))
			}
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case v.Type() == reflect.TypeFor[time.Duration]():
		return shortDuration(time.Duration(v.Int()))
	default:
		return fmt.Sprint(v.Interface())
	}
}

// shortDuration prints 60s, not 1m0s: the form that the documentation uses.
func shortDuration(d time.Duration) string {
	if d%time.Second == 0 {
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return d.String()
}

// nearest returns the name that s was most likely meant to be, or false if none
// is near: a guess that is far off sends people the wrong way.
func nearest(s string, names []string) (string, bool) {
	best, bestDistance := "", max(2, len(s)/3)+1
	for _, name := range names {
		if d := editDistance(s, name); d < bestDistance {
			best, bestDistance = name, d
		}
	}
	return best, best != ""
}

// editDistance counts insertions, deletions and substitutions (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			above := row[j+1]
			row[j+1] = min(row[j]+1, above+1, diagonal+cost)
			diagonal = above
		}
	}
	return row[len(b)]
}
