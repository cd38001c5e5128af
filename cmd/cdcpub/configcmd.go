package main

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

func (a *app) configCommand() *cobra.Command {
	var output string
	var validate, schema bool
	cmd := &cobra.Command{
		Use: "config", Short: "Show the effective configuration and where each value comes from", Args: noArgs,
		Long: `Show the configuration as run would use it: every key with its value, secrets
masked, and where it comes from, as YAML that could be a configuration file. No
server is asked.

With --validate, only say whether run would accept it, as far as that can be told
without a server. With --schema, print a JSON Schema for editors instead, which
takes no configuration.`,
		Example: `  cdcpub config
  cdcpub config --validate --config cdcpub.yml
  cdcpub config --schema > cdcpub.schema.json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			if validate && schema || (validate || schema) && cmd.Flags().Changed("output") {
				return usageError{errors.New("--validate, --schema and --output do not go together")}
			}
			if schema {
				return printJSON(a.out, configSchema())
			}
			cfg, origin, err := loadConfig(a.configFile, a.environ)
			switch {
			case err != nil:
				return err
			case validate:
				return a.validateConfig(cfg)
			case output == "json":
				return printJSON(a.out, effectiveValues(cfg, origin))
			default:
				return printConfig(a.out, cfg, origin)
			}
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&validate, "validate", false, "only say whether the configuration is valid")
	cmd.Flags().BoolVar(&schema, "schema", false, "print a JSON Schema of the configuration file")
	return cmd
}

// validateConfig refuses whatever run refuses before it connects.
func (a *app) validateConfig(cfg Config) error {
	if err := cfg.requireBroker(); err != nil {
		return err
	}
	if _, err := cfg.compile(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(a.out, "the configuration is valid")
	return err
}

// effectiveValue is one leaf key as it is in force.
type effectiveValue struct {
	Key    string `json:"key"`
	Value  any    `json:"value"`
	Origin string `json:"origin"` // default, FILE:LINE or a variable
}

const originDefault = "default"

func originOf(origin map[string]string, path string) string {
	for ; path != ""; path = parentPath(path) {
		// A list that was set as a whole says it for what is in it.
		if where := origin[path]; where != "" {
			return where
		}
		if !strings.HasSuffix(path, "]") && !strings.Contains(path, "[") {
			break
		}
	}
	return originDefault
}

func effectiveValues(cfg Config, origin map[string]string) []effectiveValue {
	var list []effectiveValue
	for _, k := range configKeys() {
		if k.index != nil {
			v := reflect.ValueOf(cfg).FieldByIndex(k.index)
			list = append(list, effectiveValue{Key: k.Path, Value: plain(v, k.field), Origin: originOf(origin, k.Path)})
		}
	}
	return list
}

// plain is a value as JSON and YAML have it, without secrets.
func plain(v reflect.Value, f reflect.StructField) any {
	switch {
	case v.Type() == reflect.TypeFor[time.Duration]():
		return shortDuration(time.Duration(v.Int()))
	case v.Type() == reflect.TypeFor[ByteSize]():
		return ByteSize(v.Int()).String()
	case v.Kind() == reflect.String:
		return mask(v.String(), f)
	case isList(v.Type()):
		list := make([]any, v.Len())
		for i := range v.Len() {
			list[i] = plain(v.Index(i), f)
		}
		return list
	case v.Kind() == reflect.Struct:
		m := map[string]any{}
		for i := range v.NumField() {
			m[yamlName(v.Type().Field(i))] = plain(v.Field(i), v.Type().Field(i))
		}
		return m
	default:
		return v.Interface()
	}
}

func mask(s string, f reflect.StructField) string {
	switch f.Tag.Get("secret") {
	case "dsn":
		return maskDSN(s)
	case "url":
		return maskURL(s)
	default:
		return s
	}
}

// printConfig writes YAML that reads back as the same configuration, but for the
// secrets.
func printConfig(w io.Writer, cfg Config, origin map[string]string) error {
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(configNode(reflect.ValueOf(cfg), reflect.StructField{}, "", origin)); err != nil {
		return fmt.Errorf("print configuration: %w", err)
	}
	return enc.Close()
}

// configNode is a value with the origin of each leaf as a comment behind it.
func configNode(v reflect.Value, f reflect.StructField, path string, origin map[string]string) *yaml.Node {
	switch {
	case v.Kind() == reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for i := range v.NumField() {
			sub := v.Type().Field(i)
			n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: yamlName(sub)},
				configNode(v.Field(i), sub, joinPath(path, yamlName(sub)), origin))
		}
		return n
	case isList(v.Type()) && v.Len() > 0:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.Len() {
			n.Content = append(n.Content, configNode(v.Index(i), f, fmt.Sprintf("%s[%d]", path, i), origin))
		}
		return n
	case v.Kind() == reflect.Map && v.Len() > 0:
		n := &yaml.Node{Kind: yaml.MappingNode}
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			name := &yaml.Node{}
			name.SetString(k.String())
			n.Content = append(n.Content, name, configNode(v.MapIndex(k), f, joinPath(path, showKey(k.String())), origin))
		}
		return n
	default:
		n := &yaml.Node{}
		// Encode fails on types only that a Config does not have.
		if err := n.Encode(plain(v, f)); err != nil {
			panic(fmt.Sprintf("encode %s: %v", path, err))
		}
		if n.Kind != yaml.ScalarNode {
			n.Style = yaml.FlowStyle
		}
		n.LineComment = "# " + originOf(origin, path)
		return n
	}
}
