package signer_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"quarry/internal/need"
	"quarry/signer"
)

const testType = "application/vnd.quarry.test+json"

func newKey(t testing.TB) *signer.Key {
	t.Helper()
	k, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// seal makes an envelope of payload signed by the keys.
func seal(t testing.TB, payload string, keys ...*signer.Key) []byte {
	t.Helper()
	e := signer.Envelope{PayloadType: testType, Payload: []byte(payload)}
	for _, k := range keys {
		e.Signatures = append(e.Signatures, signer.Sign(k, testType, e.Payload))
	}
	b, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOpenReturnsWhatATrustedKeySigned(t *testing.T) {
	a, b := newKey(t), newKey(t)
	env := seal(t, `{"x":1}`, a, b)
	for _, tc := range []struct {
		name  string
		trust signer.Trust
		want  string
	}{
		{"only the first signer is trusted", signer.NewTrust(a.Public()), a.Public().ID()},
		{"only the second signer is trusted", signer.NewTrust(b.Public()), b.Public().ID()},
		{"both are trusted, the first is named", signer.NewTrust(b.Public(), a.Public()), a.Public().ID()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			payload, id, err := signer.Open(env, testType, tc.trust)
			if err != nil {
				t.Fatal(err)
			}
			if string(payload) != `{"x":1}` || id != tc.want {
				t.Fatalf("Open = %q by %s, want by %s", payload, id, tc.want)
			}
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	k, other := newKey(t), newKey(t)
	good := string(seal(t, "p", k))
	sig := signer.Sign(k, testType, []byte("p"))
	wrongSig := signer.Sign(k, testType, []byte("q"))
	encode := func(e signer.Envelope) string {
		b, err := e.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, tc := range []struct {
		name     string
		envelope string
		trust    signer.Trust
		want     error
		says     string
	}{
		{"nothing", "", signer.NewTrust(k.Public()), signer.ErrMalformed, ""},
		{"no trusted key at all", good, signer.Trust{}, signer.ErrWrongKey, "trusted: none"},
		{"another key", good, signer.NewTrust(other.Public()), signer.ErrWrongKey, "signed by " + k.Public().ID() + "; trusted: " + other.Public().ID()},
		{"a signature of another payload", encode(signer.Envelope{PayloadType: testType, Payload: []byte("p"), Signatures: []signer.Signature{wrongSig}}),
			signer.NewTrust(k.Public()), signer.ErrAltered, k.Public().ID()},
		{"a bad signature beside a good one", encode(signer.Envelope{PayloadType: testType, Payload: []byte("p"), Signatures: []signer.Signature{
			signer.Sign(other, testType, []byte("p")), wrongSig}}), signer.NewTrust(k.Public(), other.Public()), signer.ErrAltered, k.Public().ID()},
		{"another key under the trusted id", encode(signer.Envelope{PayloadType: testType, Payload: []byte("p"), Signatures: []signer.Signature{
			{KeyID: k.Public().ID(), Sig: signer.Sign(other, testType, []byte("p")).Sig}}}), signer.NewTrust(k.Public()), signer.ErrAltered, ""},
		{"another payload type", encode(signer.Envelope{PayloadType: "t", Payload: []byte("p"), Signatures: []signer.Signature{signer.Sign(k, "t", []byte("p"))}}),
			signer.NewTrust(k.Public()), signer.ErrPayloadType, "the envelope has t"},
		{"a payload type changed after signing", encode(signer.Envelope{PayloadType: testType, Payload: []byte("p"), Signatures: []signer.Signature{
			signer.Sign(k, "t", []byte("p"))}}), signer.NewTrust(k.Public()), signer.ErrAltered, ""},
		{"a trailing newline", good + "\n", signer.NewTrust(k.Public()), signer.ErrMalformed, ""},
		{"a leading space", " " + good, signer.NewTrust(k.Public()), signer.ErrMalformed, ""},
		{"an unknown field", strings.Replace(good, "{", `{"x":1,`, 1), signer.NewTrust(k.Public()), signer.ErrMalformed, `unknown field "x"`},
		{"a field in other case", strings.Replace(good, `"payload"`, `"Payload"`, 1), signer.NewTrust(k.Public()), signer.ErrMalformed, ""},
		{"a field twice", strings.Replace(good, `{"payload"`, `{"payload":"","payload"`, 1), signer.NewTrust(k.Public()), signer.ErrMalformed, ""},
		{"base64 without padding", strings.Replace(good, `"payload":"cA=="`, `"payload":"cA"`, 1), signer.NewTrust(k.Public()), signer.ErrMalformed, "payload"},
		{"base64 with loose bits", strings.Replace(good, `"payload":"cA=="`, `"payload":"cB=="`, 1), signer.NewTrust(k.Public()), signer.ErrMalformed, "payload"},
		{"base64 with a line break", strings.Replace(good, `"payload":"cA=="`, `"payload":"cA\n=="`, 1), signer.NewTrust(k.Public()), signer.ErrMalformed, ""},
		{"no signature", `{"payload":"cA==","payloadType":"` + testType + `","signatures":[]}`, signer.NewTrust(k.Public()), signer.ErrMalformed, "0 signatures"},
		{"null signatures", `{"payload":"cA==","payloadType":"` + testType + `","signatures":null}`, signer.NewTrust(k.Public()), signer.ErrMalformed, "0 signatures"},
		{"one signature twice", strings.Replace(good, `[{`, `[{"keyid":"`+sig.KeyID+`","sig":"`+base64Of(sig.Sig)+`"},{`, 1),
			signer.NewTrust(k.Public()), signer.ErrMalformed, "two signatures"},
		{"a short signature", `{"payload":"cA==","payloadType":"t","signatures":[{"keyid":"` + sig.KeyID + `","sig":"cA=="}]}`,
			signer.NewTrust(k.Public()), signer.ErrMalformed, "has 1 bytes, want 64"},
		{"a key id that is none", strings.Replace(good, sig.KeyID, strings.ToUpper(sig.KeyID), 1), signer.NewTrust(k.Public()), signer.ErrMalformed, "key id"},
		{"too many bytes", strings.Repeat(" ", signer.MaxEnvelope+1), signer.NewTrust(k.Public()), signer.ErrMalformed, "at most"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			payload, id, err := signer.Open([]byte(tc.envelope), testType, tc.trust)
			if payload != nil || id != "" {
				t.Fatalf("Open returned a payload: %q by %q", payload, id)
			}
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
				t.Fatalf("Open: %v, want %v that says %q", err, tc.want, tc.says)
			}
		})
	}
}

func TestEncodeRefusesWhatOpenWouldRefuse(t *testing.T) {
	good := signer.Sign(newKey(t), testType, nil)
	many := make([]signer.Signature, signer.MaxSignatures+1)
	for i := range many {
		many[i] = signer.Sign(newKey(t), testType, nil)
	}
	for name, e := range map[string]signer.Envelope{
		"no signature":                   {PayloadType: testType},
		"too many signatures":            {PayloadType: testType, Signatures: many},
		"no type":                        {Signatures: []signer.Signature{good}},
		"a type with a quote":            {PayloadType: `a"b`, Signatures: []signer.Signature{good}},
		"a type of letters beyond ASCII": {PayloadType: "é", Signatures: []signer.Signature{good}},
		"a long type":                    {PayloadType: strings.Repeat("x", signer.MaxPayloadType+1), Signatures: []signer.Signature{good}},
		"a large payload":                {PayloadType: testType, Payload: make([]byte, signer.MaxPayload+1), Signatures: []signer.Signature{good}},
		"a key id of letters":            {PayloadType: testType, Signatures: []signer.Signature{{KeyID: "alice", Sig: good.Sig}}},
	} {
		if b, err := e.Encode(); !errors.Is(err, signer.ErrMalformed) {
			t.Errorf("%s: Encode = %d bytes, %v; want ErrMalformed", name, len(b), err)
		}
	}
}

func TestEveryBitFlipOfAnEnvelopeIsRefused(t *testing.T) {
	k := newKey(t)
	env, trust := seal(t, `{"some":"payload"}`, k), signer.NewTrust(k.Public())
	for bit := range len(env) * 8 {
		flipped := bytes.Clone(env)
		flipped[bit/8] ^= 1 << (bit % 8)
		if payload, _, err := signer.Open(flipped, testType, trust); err == nil {
			t.Errorf("bit %d flipped (%q for %q): payload %q", bit, flipped[bit/8], env[bit/8], payload)
		}
	}
}

func TestAnEnvelopeCannotBeUnmarshalled(t *testing.T) {
	var e signer.Envelope
	if err := json.Unmarshal(seal(t, "p", newKey(t)), &e); err == nil || e.Payload != nil {
		t.Fatalf("json.Unmarshal: %v, payload %q", err, e.Payload)
	}
}

func TestAnEnvelopeSurvivesBeingARawMessage(t *testing.T) {
	k := newKey(t)
	env := seal(t, "p", k)
	doc, err := json.Marshal(map[string]json.RawMessage{"statement": env})
	if err != nil {
		t.Fatal(err)
	}
	var back map[string]json.RawMessage
	if err := json.Unmarshal(doc, &back); err != nil {
		t.Fatal(err)
	}
	if _, _, err := signer.Open(back["statement"], testType, signer.NewTrust(k.Public())); err != nil {
		t.Fatal(err)
	}
}

func TestASignatureObjectRoundTrips(t *testing.T) {
	want := signer.Sign(newKey(t), testType, []byte("p"))
	b, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := signer.DecodeSignature(b)
	if err != nil || got.KeyID != want.KeyID || !bytes.Equal(got.Sig, want.Sig) {
		t.Fatalf("DecodeSignature = %v, %v", got, err)
	}
	for name, bad := range map[string]string{
		"empty": "", "newline": string(b) + "\n", "unknown field": strings.Replace(string(b), "{", `{"cert":"",`, 1),
		"large": strings.Repeat(" ", signer.MaxSignature+1), "no key id": `{"keyid":"","sig":""}`,
	} {
		if _, err := signer.DecodeSignature([]byte(bad)); !errors.Is(err, signer.ErrMalformed) {
			t.Errorf("%s: %v, want ErrMalformed", name, err)
		}
	}
}

func TestKeyFilesRoundTrip(t *testing.T) {
	dir := t.TempDir()
	k := newKey(t)
	private, public := filepath.Join(dir, "signing.key"), filepath.Join(dir, "signing.pub")
	if err := k.Save(private); err != nil {
		t.Fatal(err)
	}
	if err := k.Public().Save(public); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(private)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("private key: mode %v, %v", info.Mode(), err)
	}
	loaded, err := signer.LoadKey(private)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := signer.LoadPublicKey(public)
	if err != nil || pub != k.Public() || loaded.Public() != pub || len(pub.ID()) != 64 {
		t.Fatalf("loaded %v and %v (%v), want %v", loaded.Public(), pub, err, k.Public())
	}
	if err := k.Save(private); !errors.Is(err, os.ErrExist) {
		t.Fatalf("Save over a key: %v, want ErrExist", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 {
		t.Fatalf("files left: %v, %v", left, err)
	}
}

func TestLoadKeyRefuses(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	k := newKey(t)
	if err := k.Save(filepath.Join(dir, "good")); err != nil {
		t.Fatal(err)
	}
	if err := k.Public().Save(filepath.Join(dir, "pub")); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	good, pub := read("good"), read("pub")
	for _, tc := range []struct{ name, path, says string }{
		{"a file readable by the group", file("g", good, 0o640), "chmod 600"},
		{"a file readable by all", file("o", good, 0o604), "chmod 600"},
		{"a file that is not there", filepath.Join(dir, "none"), "no such file"},
		{"a folder", dir, "regular file"},
		{"a large file", file("large", strings.Repeat("x", 17<<10), 0o600), "at most"},
		{"no PEM", file("text", "hello", 0o600), "BEGIN PRIVATE KEY"},
		{"a public key", file("p", pub, 0o600), `"PUBLIC KEY", want "PRIVATE KEY"`},
		{"two keys", file("two", good+good, 0o600), "one PEM block"},
		{"text before the key", file("before", "x\n"+good, 0o600), "one PEM block"},
		{"DER that is no key", file("der", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", 0o600), "malformed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := signer.LoadKey(tc.path); err == nil || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), tc.path) {
				t.Fatalf("LoadKey: %v, want an error with %q and the path", err, tc.says)
			}
		})
	}
}

func TestLoadTrust(t *testing.T) {
	a, b := newKey(t), newKey(t)
	dir := t.TempDir()
	for name, k := range map[string]*signer.Key{"a.pub": a, "b.pub": b} {
		if err := k.Public().Save(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	// The private key beside it is not a *.pub and not touched.
	if err := a.Save(filepath.Join(dir, "a.key")); err != nil {
		t.Fatal(err)
	}
	trust, err := signer.LoadTrust(dir)
	if err != nil || len(trust.KeyIDs()) != 2 {
		t.Fatalf("folder: %v, %v", trust.KeyIDs(), err)
	}
	trust, err = signer.LoadTrust(filepath.Join(dir, "b.pub"))
	if err != nil || len(trust.KeyIDs()) != 1 || trust.KeyIDs()[0] != b.Public().ID() {
		t.Fatalf("file: %v, %v", trust.KeyIDs(), err)
	}
	if _, err := signer.LoadTrust(filepath.Join(dir, "a.key")); err == nil || !strings.Contains(err.Error(), "give its .pub file") {
		t.Fatalf("a private key as trust: %v", err)
	}
	if _, err := signer.LoadTrust(t.TempDir()); err == nil || !strings.Contains(err.Error(), "no *.pub file") {
		t.Fatalf("empty folder: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "c.pub"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := signer.LoadTrust(dir); !errors.Is(err, signer.ErrMalformed) || !strings.Contains(err.Error(), "c.pub") {
		t.Fatalf("a bad file in the folder: %v", err)
	}
	if _, err := signer.LoadTrust(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("nothing there: %v", err)
	}
}

func TestAKeyIsNeverPrinted(t *testing.T) {
	dir := t.TempDir()
	k := newKey(t)
	if err := k.Save(filepath.Join(dir, "k")); err != nil {
		t.Fatal(err)
	}
	raw := rawSeed(t, filepath.Join(dir, "k"))
	var logged bytes.Buffer
	slog.New(slog.NewTextHandler(&logged, nil)).Info("m", "key", k)
	slog.New(slog.NewJSONHandler(&logged, nil)).Info("m", "key", k)
	type holder struct{ k signer.Key }
	asJSON, err := json.Marshal(map[string]any{"key": k})
	if err != nil {
		t.Fatal(err)
	}
	all := logged.String() + string(asJSON)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%X", "%d", "%q"} {
		all += fmt.Sprintf(verb, k) + fmt.Sprintf(verb, *k) + fmt.Sprintf(verb, holder{*k}) + fmt.Sprintf(verb, &holder{*k})
	}
	for _, form := range []string{fmt.Sprintf("%x", raw[:8]), fmt.Sprintf("%X", raw[:8]), strings.Trim(fmt.Sprint(raw[:8]), "[]"), base64Of(raw)[:10], string(raw)} {
		if strings.Contains(all, form) {
			t.Errorf("the private key is in the output as %q", form)
		}
	}
	if !strings.Contains(all, "redacted") {
		t.Error("nothing says that the key is redacted")
	}
}

func TestOpenSSLReadsOurKeysAndWeReadIts(t *testing.T) {
	openssl := need.Tool(t, "openssl")
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	run := func(args ...string) []byte {
		t.Helper()
		out, err := exec.Command(openssl, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("openssl %v: %v\n%s", args, err, out)
		}
		return out
	}
	ours := newKey(t)
	if err := errors.Join(ours.Save(path("ours.key")), ours.Public().Save(path("ours.pub"))); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(path("ours.pub"))
	if err != nil {
		t.Fatal(err)
	}
	if got := run("pkey", "-in", path("ours.key"), "-pubout"); !bytes.Equal(got, want) {
		t.Errorf("openssl derives another public key:\n%s\n%s", got, want)
	}

	run("genpkey", "-algorithm", "ed25519", "-out", path("theirs.key"))
	run("pkey", "-in", path("theirs.key"), "-pubout", "-out", path("theirs.pub"))
	if err := os.Chmod(path("theirs.key"), 0o600); err != nil {
		t.Fatal(err)
	}
	theirs, err := signer.LoadKey(path("theirs.key"))
	if err != nil {
		t.Fatal(err)
	}
	pub, err := signer.LoadPublicKey(path("theirs.pub"))
	if err != nil || pub != theirs.Public() {
		t.Fatalf("public key %v, %v; want %v", pub, err, theirs.Public())
	}

	sig := signer.Sign(theirs, "t", []byte("p"))
	for name, b := range map[string][]byte{"sig": sig.Sig, "message": []byte("DSSEv1 1 t 1 p")} {
		if err := os.WriteFile(path(name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run("pkeyutl", "-verify", "-pubin", "-inkey", path("theirs.pub"), "-rawin", "-in", path("message"), "-sigfile", path("sig"))

	run("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", path("rsa.key"))
	if err := os.Chmod(path("rsa.key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := signer.LoadKey(path("rsa.key")); err == nil || !strings.Contains(err.Error(), "want an Ed25519 key") {
		t.Errorf("an RSA key: %v", err)
	}
}
