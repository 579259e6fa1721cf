// Renders a Helm chart with Go's own template engine, and with those of Helm's functions that our chart uses. Helm
// itself is in no package registry that we read. Standard input: {"Values": …, "Release": …, "Chart": …}; the argument is
// the chart's folder. A function that is not here, or a value that does not exist, is an error.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"text/template"
)

// Files is Helm's .Files: the chart's own files, as they are.
type Files struct{ folder string }

func (files Files) Get(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(files.folder, name))
	return string(text), err
}

func main() {
	if err := render(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render(folder string) error {
	var data map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&data); err != nil {
		return err
	}
	data["Files"] = Files{folder}
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var text strings.Builder
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
		"toJson": func(value any) (string, error) {
			text, err := json.Marshal(value)
			return string(text), err
		},
		"quote": func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"indent": func(spaces int, text string) string {
			pad := strings.Repeat(" ", spaces)
			return pad + strings.ReplaceAll(text, "\n", "\n"+pad)
		},
		"default": func(other, value any) any {
			if value == nil || reflect.ValueOf(value).IsZero() {
				return other
			}
			return value
		},
	})
	if _, err := all.ParseGlob(filepath.Join(folder, "templates", "*")); err != nil {
		return err
	}
	names, err := filepath.Glob(filepath.Join(folder, "templates", "*.yaml"))
	if err != nil {
		return err
	}
	for _, name := range names {
		var text strings.Builder
		if err := all.ExecuteTemplate(&text, filepath.Base(name), data); err != nil {
			return err
		}
		if found := strings.TrimSpace(text.String()); found != "" {
			fmt.Printf("---\n%s\n", found)
		}
	}
	return nil
}
