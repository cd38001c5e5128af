package main

import (
	"reflect"
	"strings"
	"time"
)

// configSchema is a JSON Schema (draft 2020-12) of cdcpub.yml, made from the
// types that the file is read into. It knows shapes and single values; rules
// between keys are the loader's alone.
func configSchema() map[string]any {
	s := structSchema(reflect.ValueOf(NewConfig()))
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "cdcpub.yml"
	s["description"] = "Configuration of cdcpub, which publishes the rows of a PostgreSQL outbox table to RabbitMQ."
	return s
}

func structSchema(v reflect.Value) map[string]any {
	properties := map[string]any{}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		p := valueSchema(v.Field(i), f)
		if doc := f.Tag.Get("doc"); doc != "" {
			p["description"] = doc
		}
		properties[yamlName(f)] = p
	}
	return map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
}

// valueSchema is the schema of one key. A default is in it where the key has one
// at the top level; what is inside of a list has none.
func valueSchema(v reflect.Value, f reflect.StructField) map[string]any {
	t := v.Type()
	if t.Kind() == reflect.Struct {
		return structSchema(v)
	}
	s := typeSchema(t, f)
	if !v.IsZero() && f.Tag.Get("secret") == "" {
		s["default"] = plain(v, f)
		if list, ok := s["default"].([]any); ok && t.Elem().Kind() == reflect.Struct {
			s["default"] = withoutEmpty(list)
		}
	}
	return s
}

func typeSchema(t reflect.Type, f reflect.StructField) map[string]any {
	switch t {
	case reflect.TypeFor[time.Duration]():
		return map[string]any{"type": "string", "pattern": `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`}
	case reflect.TypeFor[ByteSize]():
		return map[string]any{"anyOf": []any{
			map[string]any{"type": "integer", "minimum": 0},
			map[string]any{"type": "string", "pattern": `^[0-9]+(KiB|MiB|GiB)?$`},
		}}
	}
	switch t.Kind() {
	case reflect.String:
		s := map[string]any{"type": "string"}
		if enum := f.Tag.Get("enum"); enum != "" {
			s["enum"] = strings.Split(enum, ",")
		}
		return s
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Int:
		return map[string]any{"type": "integer"}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": map[string]any{"type": "string"}}
	case reflect.Slice:
		var items map[string]any
		if t.Elem().Kind() == reflect.Struct {
			items = structSchema(reflect.Zero(t.Elem()))
		} else {
			items = typeSchema(t.Elem(), f)
		}
		return map[string]any{"type": "array", "items": items}
	default:
		panic("configuration field of unsupported type " + t.String())
	}
}

// withoutEmpty leaves out of a default what would only repeat other defaults.
func withoutEmpty(list []any) []any {
	var out []any
	for _, item := range list {
		m, _ := item.(map[string]any)
		short := map[string]any{}
		for key, value := range m {
			if s, ok := value.(string); ok && s != "" {
				short[key] = s
			}
		}
		out = append(out, short)
	}
	return out
}
