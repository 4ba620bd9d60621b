package archtest

import "slices"

// module is the module's path, which starts every import of ours.
const module = "quarry"

// ground is what everything may stand on.
var ground = []string{"store/chunk", "store", "store/bucket", "signer", "internal/durable", "internal/rescue", "internal/strictjson"}

// formats are the bytes on disk and what is derived from them alone.
var formats = []string{"rafs", "store/pack", "store/image", "store/catalog", "store/trace", "store/jobs"}

// arrows says which packages of ours each package may import. It is the import
// table of docs/ARCHITECTURE.md in full: down only, and api, converter and
// worker never one another. A package without a row fails the test, and
// so does a row without a package: a new package is a decision about where it
// stands.
var arrows = map[string][]string{
	// Ground.
	"store/chunk":         {},
	"internal/durable":    {},
	"internal/strictjson": {},
	"internal/proc":       {},
	"internal/fdpass":     {},
	"internal/netns":      {},
	"internal/swap":       {},
	"internal/rescue":     {},
	"internal/wakeup":     {},
	"internal/inflate":    {},
	"nbd":                 {}, // so that any NBD program can stand on either side of it
	"store/bucket":        {},
	"store":               {"store/chunk"},
	"signer":              {"store/chunk", "internal/durable", "internal/strictjson"},

	// Formats, and the implementations of store and bucket that are one file each.
	"rafs":             {"store/chunk"},
	"rafs/foreign":     {"rafs", "store/chunk"},
	"store/pack":       {"store/chunk"},
	"store/image":      {"rafs", "signer", "store/chunk", "internal/strictjson"},
	"store/catalog":    {"store/chunk", "store/bucket", "internal/strictjson"},
	"store/jobs":       {"store/bucket", "store/chunk", "store/image", "internal/rescue"},
	"store/follow":     {"store/catalog"},
	"store/writer":     {"store/bucket", "store/catalog", "internal/strictjson"},
	"store/trace":      {"rafs", "store/chunk", "store/image", "store/pack"},
	"store/mem":        {"store", "store/chunk"},
	"store/bucket/dir": {"store/bucket", "internal/durable"},
	"store/bucket/mem": {"store/bucket"},
	"store/bucket/s3":  {"store/bucket"},
	"chunkindex":       {"store/chunk", "store/pack"},

	// Stores and devices.
	"store/names":         {"signer", "store/catalog", "store/chunk", "store/image"},
	"store/registry":      {"signer", "store/bucket", "store/catalog", "store/chunk", "store/image", "store/names", "internal/durable", "internal/strictjson"},
	"store/packed":        {"chunkindex", "store", "store/bucket", "store/bucket/ranges", "store/catalog", "store/chunk", "store/pack", "internal/strictjson"},
	"store/cache":         {"store", "store/chunk", "internal/proc"},
	"store/bucket/ranges": {"store/bucket", "store/cache", "store/chunk"},
	"nbd/blockdev":        {"nbd", "rafs", "store", "store/chunk"},
	"nbd/attach":          {"nbd"}, // the shim links it: it must stay small

	// What works on a whole store, beside the three that never import one another.
	"store/check":          {"rafs", "signer", "store", "store/bucket", "store/catalog", "store/chunk", "store/image", "store/jobs", "store/pack", "store/packed", "store/registry", "store/trace"},
	"api/access":           {"internal/durable", "internal/proc", "internal/strictjson", "store/image"},
	"api/gate":             {},
	"store/lease":          {"store/bucket", "store/chunk", "internal/strictjson"},
	"store/gc":             {"rafs", "store/bucket", "store/catalog", "store/chunk", "store/image", "store/pack", "store/packed", "store/registry", "store/trace"},
	"api":                  join(ground, formats, "api/access", "api/gate", "store/packed", "store/lease"),
	"api/registry":         {"api/access", "api/gate", "store", "store/bucket", "store/catalog", "store/image", "store/jobs", "store/registry"},
	"api/client":           join(ground, formats, "api"),
	"api/page":             join(ground, formats), // cmd wires it to api
	"converter":            join(ground, formats, "store/names", "store/packed", "converter/oci", "converter/tree", "converter/layer", "converter/proof"),
	"converter/proof":      {"internal/rescue", "converter/tree", "nbd/blockdev", "rafs", "store", "store/chunk"},
	"converter/oci":        {"converter/layer", "store/chunk", "store/image"},
	"converter/layer":      {"internal/inflate", "internal/rescue", "rafs", "store", "store/chunk", "store/image"},
	"converter/tree":       {"rafs", "store", "store/chunk", "store/image"},
	"worker":               {"nbd/attach", "rafs", "store/chunk", "store/image", "internal/proc", "worker/folder", "worker/reader", "worker/timeline"},
	"worker/timeline":      {},
	"worker/sandbox":       {"store/chunk"}, // the contract that api/sandboxes and worker/node share
	"worker/cgroup":        {"internal/proc"},
	"worker/node":          {"worker/memory", "worker/network/wait", "worker", "worker/cgroup", "worker/folder", "worker/guest", "worker/holder", "worker/network", "worker/reader", "worker/sandbox", "worker/sentry", "nbd/attach", "store/chunk", "internal/durable", "internal/proc", "internal/strictjson"},
	"worker/network":       {"worker/network/dns", "worker/sandbox", "internal/proc"},
	"worker/network/dns":   {},
	"worker/network/apart": {"internal/netns"}, // a node beside the machine, for tests and benches
	"worker/memory":        {},

	"worker/sentry":            {"internal/fdpass"},
	"worker/sentry/sentrytest": {"internal/need"},                                                                               // only tests import it
	"worker/holder":            {"worker/sandbox", "worker/sentry", "worker/session", "internal/fdpass", "internal/strictjson"}, // the shim links it: it must stay small

	"worker/guest":        {"worker/guest/flat", "worker/guest/wire", "worker/sandbox"},
	"worker/session":      {"worker/sentry"},
	"worker/guest/flat":   {},
	"worker/network/wait": {}, // apart from the daemon that asks it

	"worker/guest/wire": {}, // the helper in the guest links it: it must stay small

	"worker/folder": {"worker/timeline", "rafs", "signer", "store/chunk", "store/image", "internal/durable", "internal/proc"},
	"worker/reader": {"nbd", "nbd/blockdev", "rafs", "store", "store/cache", "store/chunk", "store/trace", "internal/proc", "internal/wakeup", "worker/folder", "worker/timeline"},

	"api/sandboxes":        {"api/access", "internal/strictjson", "worker/sandbox"},
	"api/sandboxes/client": {"api/sandboxes", "worker/sandbox"},
	"api/sandboxes/page":   {"worker/sandbox"},

	// A worker and its sandboxes.
	"internal/agentbench": {"internal/swap", "api/sandboxes/client", "worker/cgroup", "worker/network/apart", "worker/sandbox"},

	// Programs.
	"cmd/quarry": join(ground, formats, "nbd", "nbd/blockdev", "nbd/attach", "chunkindex", "store/bucket/dir", "store/bucket/ranges", "store/bucket/s3", "store/packed", "store/follow", "store/writer", "store/registry", "store/gc", "store/lease",
		"internal/proc", "store/cache", "store/check", "api", "api/access", "api/client", "api/page", "api/registry", "api/sandboxes", "api/sandboxes/client", "api/sandboxes/page", "internal/agentbench", "worker/node", "worker/sandbox", "worker/network", "worker/network/wait", "worker/memory", "converter", "converter/oci", "converter/proof", "converter/tree", "worker", "worker/folder", "worker/reader", "worker/timeline"),
	"cmd/quarry-shim": {"nbd", "nbd/attach", "worker/holder"},

	"cmd/quarry-guest": {"worker/guest/wire"}, // starts in a guest for each call: it must stay small

	// What only tests import. None of these names stands in a row above.
	"internal/archtest":       {},
	"internal/layermodel":     {"internal/testimage"},
	"internal/metricrows":     {},
	"internal/erofstest":      {"internal/need"},
	"internal/need":           {},
	"internal/storm":          {},
	"internal/testimage":      {},
	"store/bucket/buckettest": {"store/bucket"},
	"store/bucket/s3/s3test":  {"internal/need"},
	"store/storetest":         {"store", "store/chunk"},
	"api/apitest":             join(ground, formats, "api", "store/packed", "store/bucket/mem", "store/bucket/buckettest", "chunkindex"),
	"e2e/lab":                 {"rafs"},
	"e2e/lab/proxy":           {},
	"e2e/lab/traffic":         {"e2e/lab/proxy", "api", "store/chunk", "store/trace"},
	"chunkindex/mem":          {"chunkindex", "store/chunk", "store/pack", "store/packed"},
	"chunkindex/indextest":    {"chunkindex", "store/chunk", "store/pack"},
	"e2e/bench":               {"internal/agentbench", "api/sandboxes", "api/sandboxes/client", "worker/sandbox", "e2e/lab", "e2e/lab/proxy", "e2e/lab/traffic", "api", "rafs", "store/trace", "internal/storm", "chunkindex", "chunkindex/indextest", "converter/oci", "store/chunk", "store/bucket/dir", "store/bucket/s3/s3test", "store/catalog", "store/jobs"},
	"e2e/demo":                {"e2e/lab"},
	"e2e/vm":                  {"internal/proc"},
	"e2e/record":              {"e2e/lab", "api/client", "nbd", "nbd/attach", "nbd/blockdev", "rafs", "signer", "store/chunk", "store/image", "store/pack"},
	"e2e/corpus":              {"e2e/lab", "e2e/corpus/build", "e2e/corpus/measure"},
	"e2e/corpus/build":        {},
	"e2e/corpus/measure":      {"api", "chunkindex", "converter/layer", "converter/oci", "converter/tree", "rafs", "store", "store/chunk", "store/image", "store/pack"},
}

// onlyIn says which package, with those below it, alone may import a module of others.
var onlyIn = map[string]string{
	"github.com/aws":                         "store/bucket/s3",
	"github.com/cockroachdb/pebble":          "chunkindex",
	"github.com/google/go-containerregistry": "converter/oci",
	"github.com/google/nftables":             "worker/network",
	"github.com/vishvananda":                 "worker/network",
	"golang.org/x/net/dns":                   "worker/network/dns",
}

// forbidden says which imports nobody may have, and what to use.
var forbidden = map[string]string{
	"log":       "use log/slog",
	"math/rand": "use math/rand/v2",
	"github.com/prometheus/client_golang/prometheus/promauto": "register metrics where they are owned",
}

// vague are package names that say nothing about what is inside.
var vague = []string{"util", "utils", "common", "helper", "helpers", "types", "models", "interfaces"}

func join(a, b []string, more ...string) []string { return slices.Concat(a, b, more) }
