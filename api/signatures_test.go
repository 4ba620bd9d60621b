package api_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
)

// What there is to sign is the payload that a signature is of, and what was signed.
func TestWhatThereIsToSign(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/x:1", 2, 1)
	other := w.Publish(t, "team/x:2", 2, 2)
	w.PutStatement(t, img, false)
	if err := w.Bucket.Delete(t.Context(), image.SigKey(other.Source, other.Platform, w.Key.Public().ID())); err != nil {
		t.Fatal(err)
	}
	srv, _ := w.Serve(t, nil)
	c, err := client.New(client.Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	byDigest := image.Ref{Repo: "team/x", Digest: &img.Source}
	moved := image.Ref{Repo: "team/x", Tag: "2", Digest: &img.Source}
	for _, tt := range []struct {
		ref    image.Ref
		source chunk.Digest
		names  *chunk.Digest
		signed bool
	}{
		{img.Ref, img.Source, &img.Source, true}, {byDigest, img.Source, nil, true}, {moved, img.Source, &other.Source, true},
		{other.Ref, other.Source, &other.Source, false},
	} {
		s, err := c.Signable(t.Context(), tt.ref)
		if err != nil || len(s.Images) != 1 {
			t.Fatalf("%s: %+v, %v", tt.ref, s, err)
		}
		st, err := image.DecodeStatement(s.Images[0].Statement)
		if err != nil || s.Source != tt.source || st.Source != tt.source || s.Images[0].Platform != img.Platform.String() {
			t.Errorf("%s: source %s, statement of %s, %v", tt.ref, s.Source, st.Source, err)
		}
		if (s.Name != nil) != (tt.names != nil) || s.Name != nil && (s.Name.Source != *tt.names || s.Name.Serial != 1 || len(s.Name.Statement) == 0) {
			t.Errorf("%s: name %+v", tt.ref, s.Name)
		}
		payload, _, err := signer.Open(s.Images[0].Image, image.StatementType, signer.NewTrust(w.Key.Public()))
		if (err == nil) != tt.signed || tt.signed && string(payload) != string(s.Images[0].Statement) {
			t.Errorf("%s: envelope of %q, %v", tt.ref, payload, err)
		}
	}
	none := chunk.Sum(nil)
	for ref, want := range map[image.Ref]error{
		{Repo: "team/y", Tag: "1"}:                     api.ErrRepoUnknown,
		{Repo: "team/x", Tag: "3"}:                     api.ErrTagUnknown,
		{Repo: "team/x", Tag: "latest", Digest: &none}: api.ErrImageUnknown,
	} {
		if s, err := c.Signable(t.Context(), ref); !errors.Is(err, want) {
			t.Errorf("%s: %+v, %v; want %v", ref, s, err, want)
		}
	}
}

func TestSignaturesAreTakenForOneDigest(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/x:1", 2, 1)
	var got []string
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.Sign = func(_ context.Context, ref image.Ref, req api.SignRequest) error {
			b, err := json.Marshal(req)
			got = append(got, ref.String()+" "+string(b))
			return err
		}
	})
	ref := img.Ref
	ref.Digest = &img.Source
	url := srv.URL + "/v1/signatures/" + ref.String()
	for name, tt := range map[string]struct {
		url, body, code string
		status          int
	}{
		"no digest":         {srv.URL + "/v1/signatures/team/x:1", `{"images":[]}`, "bad_request", 400},
		"not JSON":          {url, `x`, "bad_request", 400},
		"an unknown field":  {url, `{"images":[],"x":1}`, "bad_request", 400},
		"too large":         {url, `{"images":[],"name":"` + strings.Repeat("x", api.MaxSignRequest) + `"}`, "too_large", 413},
		"too many":          {url, `{"images":[` + strings.Repeat(`{"platform":"a"},`, api.MaxSignImages) + `{"platform":"a"}]}`, "bad_request", 400},
		"a query":           {url + "?platform=linux/amd64", `{"images":[]}`, "bad_request", 400},
		"a broken platform": {url, `{"images":[{"platform":1}]}`, "bad_request", 400},
	} {
		wantError(t, ask(t, "POST", tt.url, tt.body, "Content-Type", api.TypeJSON), tt.status, tt.code)
		if len(got) > 0 {
			t.Fatalf("%s: it was taken: %q", name, got)
		}
	}
	body := `{"images":[{"platform":"linux/amd64","signature":{"keyid":"k"}}],"name":{"payload":"p"}}`
	if a := ask(t, "POST", url, body, "Content-Type", api.TypeJSON); a.StatusCode != http.StatusNoContent || len(got) != 1 || got[0] != ref.String()+" "+body {
		t.Errorf("status %d %s, taken %q", a.StatusCode, a.body, got)
	}
	not, _ := w.Serve(t, nil)
	wantError(t, ask(t, "POST", not.URL+"/v1/signatures/"+ref.String(), body), 501, "not_offered")
}
