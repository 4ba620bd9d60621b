package converter

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"quarry/converter/layer"
	"quarry/converter/tree"
	"quarry/store/image"
)

// Limits are what a conversion may cost, under the names of their fields, which
// errors, docs/conversion.md and docs/sources.md use too. Zero fields mean the defaults.
type Limits struct {
	Layer layer.Limits
	Tree  tree.Limits
	// RecordBytes is what the entries of all layers together may take in memory.
	// A kilobyte of tar can hold a sparse file of a million chunks, and an image a
	// thousand such layers.
	RecordBytes int64
}

// DefaultRecordBytes is 400 bytes for each of tree.DefaultNames.
const DefaultRecordBytes = 4 << 30

// most are the limits that the format bounds: their defaults are the most.
var most = map[string]int64{
	"Depth":           tree.DefaultDepth,
	"NameBytes":       tree.DefaultNameBytes,
	"TargetBytes":     tree.DefaultTargetBytes,
	"XattrNameBytes":  tree.DefaultXattrNameBytes,
	"XattrValueBytes": tree.DefaultXattrValueBytes,
	"XattrBytes":      tree.DefaultXattrBytes,
}

// fields returns the limits by name; all are integers.
func (l *Limits) fields() map[string]reflect.Value {
	all := map[string]reflect.Value{"RecordBytes": reflect.ValueOf(l).Elem().FieldByName("RecordBytes")}
	for _, group := range []any{&l.Layer, &l.Tree} {
		v := reflect.ValueOf(group).Elem()
		for i := range v.NumField() {
			all[v.Type().Field(i).Name] = v.Field(i)
		}
	}
	return all
}

// LimitNames returns the names of all limits, sorted.
func LimitNames() []string {
	var names []string
	for name := range new(Limits).fields() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// recordBytes returns what entries take in memory, for Limits.RecordBytes.
func recordBytes(entries []image.Entry) int64 {
	var total int64
	for i := range entries {
		total += layer.EntryBytes(&entries[i], int64(len(entries[i].Chunks)))
	}
	return total
}

// Set sets a limit by its name.
func (l *Limits) Set(name string, value int64) error {
	f, ok := l.fields()[name]
	if !ok {
		return fmt.Errorf("limit %.64q: there is no such limit, but %s", name, strings.Join(LimitNames(), ", "))
	}
	if value < 1 {
		return fmt.Errorf("limit %s=%d: want 1 or more", name, value)
	}
	if m, bounded := most[name]; bounded && value > m {
		return fmt.Errorf("limit %s=%d: %d is the most that an image can have", name, value, m)
	}
	f.SetInt(value)
	return nil
}

// SetAll sets many limits by their names.
func (l *Limits) SetAll(values map[string]int64) error {
	for name, value := range values {
		if err := l.Set(name, value); err != nil {
			return err
		}
	}
	return nil
}

// units are the suffixes that a limit's value may have.
var units = []struct {
	suffix string
	bits   uint
}{{"Ki", 10}, {"Mi", 20}, {"Gi", 30}, {"Ti", 40}}

// ParseLimit reads NAME=VALUE, such as MaxBytes=512Gi, and checks both.
func ParseLimit(s string) (name string, value int64, err error) {
	name, text, ok := strings.Cut(s, "=")
	if !ok {
		return "", 0, fmt.Errorf("limit %.64q: want NAME=VALUE, such as MaxBytes=512Gi", s)
	}
	var bits uint
	for _, u := range units {
		if number, has := strings.CutSuffix(text, u.suffix); has {
			text, bits = number, u.bits
		}
	}
	value, err = strconv.ParseInt(text, 10, 64)
	if err != nil || value > 1<<(62-bits) {
		return "", 0, fmt.Errorf("limit %.64q: want a number from 1 to 2^62, with Ki, Mi, Gi or Ti behind it for 2^10, 2^20, 2^30 or 2^40", s)
	}
	value <<= bits
	return name, value, new(Limits).Set(name, value)
}
