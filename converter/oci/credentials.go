package oci

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/google/go-containerregistry/pkg/authn"
)

// Secret is a word that must not be seen: it prints as [redacted] wherever it is
// not asked for by converting it to a string.
type Secret string

const redacted = "[redacted]"

// String implements fmt.Stringer.
func (Secret) String() string { return redacted }

// GoString implements fmt.GoStringer, for %#v.
func (Secret) GoString() string { return redacted }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements encoding.TextMarshaler, so that JSON does not show it
// either.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Credentials are what a registry is shown. Zero means none.
type Credentials struct {
	Username      string
	Password      Secret
	IdentityToken Secret // exchanged for a bearer token
	RegistryToken Secret // a bearer token
}

func (c Credentials) authenticator() authn.Authenticator {
	if c == (Credentials{}) {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{
		Username: c.Username, Password: string(c.Password),
		IdentityToken: string(c.IdentityToken), RegistryToken: string(c.RegistryToken),
	})
}

// UserCredentials returns what docker's config file of this user has for the
// registry that src names: from $DOCKER_CONFIG or ~/.docker, its auths,
// credHelpers and credsStore, or from podman's auth.json. Other sources need
// none.
func UserCredentials(ctx context.Context, src string) (Credentials, error) {
	ref, err := parseRegistrySource(src)
	if err != nil || ref == nil {
		return Credentials{}, nil // whoever opens it says what is wrong with it
	}
	reg := ref.Context().Registry
	auth, err := authn.Resolve(ctx, authn.DefaultKeychain, reg)
	if err != nil {
		return Credentials{}, fmt.Errorf("credentials for %s: %w", reg, err)
	}
	c, err := authn.Authorization(ctx, auth)
	if err != nil {
		return Credentials{}, fmt.Errorf("credentials for %s: %w", reg, err)
	}
	return Credentials{
		Username: c.Username, Password: Secret(c.Password),
		IdentityToken: Secret(c.IdentityToken), RegistryToken: Secret(c.RegistryToken),
	}, nil
}
