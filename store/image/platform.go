package image

import (
	"fmt"
	"regexp"
	"runtime"
	"strings"
)

// maxPlatformPart bounds each part of a platform in bytes.
const maxPlatformPart = 32

// A part has no '-' and no '/', so that text and key fall apart one way only.
var platformPart = regexp.MustCompile(`^[a-z0-9][a-z0-9._]*$`)

// Platform is what an image runs on, in OCI's words and normalised: NewPlatform
// and ParsePlatform make it. Comparable.
type Platform struct {
	OS, Arch string
	Variant  string // "" when the architecture has only one that counts
}

// NewPlatform normalises an operating system, architecture and variant as they
// stand in OCI manifests and uname: x86_64 is amd64, aarch64 and arm64/v8 are
// arm64, arm is arm/v7.
func NewPlatform(os, arch, variant string) (Platform, error) {
	p := Platform{OS: strings.ToLower(os), Arch: strings.ToLower(arch), Variant: strings.ToLower(variant)}
	p = p.normalised()
	if !validPart(p.OS) || !validPart(p.Arch) || (p.Variant != "" && !validPart(p.Variant)) {
		return Platform{}, platformError(p.String())
	}
	return p, nil
}

func validPart(s string) bool { return len(s) <= maxPlatformPart && platformPart.MatchString(s) }

func platformError(s string) error {
	return fmt.Errorf("platform %q: want OS/ARCH or OS/ARCH/VARIANT, such as linux/amd64", s)
}

func (p Platform) normalised() Platform {
	switch p.Arch {
	case "x86_64", "x86-64":
		p.Arch = "amd64"
	case "i386", "i486", "i586", "i686", "x86":
		p.Arch = "386"
	case "aarch64":
		p.Arch = "arm64"
	case "armhf":
		p.Arch, p.Variant = "arm", "v7"
	case "armel":
		p.Arch, p.Variant = "arm", "v6"
	}
	switch {
	case p.Arch == "amd64" && p.Variant == "v1", p.Arch == "arm64" && (p.Variant == "v8" || p.Variant == "8"):
		p.Variant = ""
	case p.Arch == "arm" && p.Variant == "":
		p.Variant = "v7"
	case p.Arch == "arm" && len(p.Variant) == 1:
		p.Variant = "v" + p.Variant
	}
	return p
}

// ParsePlatform reads OS/ARCH[/VARIANT] and normalises it.
func ParsePlatform(s string) (Platform, error) {
	os, arch, _ := strings.Cut(s, "/")
	arch, variant, hasVariant := strings.Cut(arch, "/")
	if hasVariant && variant == "" {
		return Platform{}, platformError(s)
	}
	return NewPlatform(os, arch, variant)
}

// HostPlatform is the platform this program runs on.
func HostPlatform() Platform {
	p, err := NewPlatform(runtime.GOOS, runtime.GOARCH, "")
	if err != nil {
		panic("image: Go's own platform is one: " + err.Error())
	}
	return p
}

// String returns the text form, such as linux/amd64 or linux/arm/v7.
func (p Platform) String() string { return p.join("/") }

// Key returns the form in object keys, such as linux-amd64 or linux-arm-v7.
func (p Platform) Key() string { return p.join("-") }

func (p Platform) join(sep string) string {
	s := p.OS + sep + p.Arch
	if p.Variant != "" {
		s += sep + p.Variant
	}
	return s
}

// MarshalText implements encoding.TextMarshaler with the text form.
func (p Platform) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParsePlatform.
func (p *Platform) UnmarshalText(b []byte) error {
	v, err := ParsePlatform(string(b))
	if err != nil {
		return err
	}
	*p = v
	return nil
}
