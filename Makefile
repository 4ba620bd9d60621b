# Two commands do everything on a fresh Debian 12 machine, as root:
#   make demo    all set-up, then the main job
#   make test    all set-up, then every test

SHELL := /bin/sh
CACHE := $(CURDIR)/.cache
BIN := $(CURDIR)/bin
export PATH := $(BIN):$(PATH)
# Neither program has C in it, and with cgo all of it would be compiled once more, its
# C too; only -race wants that.
export CGO_ENABLED := 0
export QUARRY_BIN := $(BIN)
export QUARRY_IMAGES := $(CACHE)/images
export QUARRY_DEBS := $(CACHE)/debs
export QUARRY_VM := $(CACHE)/vm
export QUARRY_CORPUS := $(CACHE)/corpus
export QUARRY_BENCH_CACHE := $(CACHE)/bench
# Where tests put what somebody may want to look at: pictures of the page for people.
export QUARRY_ARTIFACTS := $(CACHE)/artifacts

# The version quarry doctor names is the one that is installed here.
RUNSC := $(shell sed -n 's/^const runscModule = "\(.*\)"/\1/p' cmd/quarry/doctor.go)
VERSITYGW := github.com/versity/versitygw/cmd/versitygw@v1.8.0
CONFORMANCE := github.com/opencontainers/distribution-spec/conformance@v0.0.0-20260831232431-97274622c111
CRANE := github.com/google/go-containerregistry/cmd/crane@v0.22.1
REGCTL := github.com/regclient/regclient/cmd/regctl@v0.11.7
DISTRIBUTION := github.com/distribution/distribution/v3/cmd/registry@v3.1.2
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOTESTSUM := gotest.tools/gotestsum@v1.13.0
PACKAGES := ca-certificates gcc libc6-dev debootstrap umoci skopeo erofs-utils libnbd-bin nbdkit qemu-utils attr zstd openssl util-linux busybox-static procps \
	qemu-system-x86 kmod cpio xz-utils libcap2-bin mmdebstrap fio python3-libnbd python3-requests nginx-light buildah chromium fonts-dejavu-core
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
SOURCES := $(shell find . -name '*.go' -not -name '*_test.go' -not -path './.cache/*') go.mod go.sum

.PHONY: demo test unit ready bench faults lint fuzz long e2e vm interop bench-all corpus corpus-report record golden build setup images pair clean

demo: setup build pair
	go run ./e2e/demo

# A test that fails is run again, up to twice: the tests start thousands of processes on
# machines that others use too. What was run again is listed with how often it failed,
# and is a defect to mend. More than three failures, a data race, a panic and a package
# that takes too long are failures at once.
RERUN = $(BIN)/gotestsum --format standard-quiet --rerun-fails=2 --rerun-fails-max-failures=3 --rerun-fails-run-root-test \
	--rerun-fails-abort-on-data-race --rerun-fails-report $(QUARRY_ARTIFACTS)/rerun-$(1).txt --packages

# The programs' own tests come after the packages': both want the whole machine. What
# they run are the built programs, which -race does not see into.
test: setup build images lint $(BIN)/gotestsum
	@mkdir -p $(QUARRY_ARTIFACTS) && rm -f $(QUARRY_ARTIFACTS)/rerun-*.txt
	CGO_ENABLED=1 $(call RERUN,packages) "$$(go list ./... | grep -v /e2e)" -- -race -timeout 20m
	go test -timeout 20m -count=1 -run Simulation ./store/gc
	$(call RERUN,e2e) ./e2e/... -- -timeout 45m -p 1
	@echo "tests that were run again:"; cat $(QUARRY_ARTIFACTS)/rerun-*.txt 2>/dev/null || echo none

# Unit and package tests alone, quick, without the built programs.
unit:
	go test $$(go list ./... | grep -v /e2e)

e2e: setup build images
	go test -timeout 45m -count=1 ./e2e/...

# Boots Debian kernels in QEMU; part of test.
vm: setup build images
	go test -count=1 -timeout 45m -v ./e2e/vm

# Stock Nydus and the kernel read our images; builds nydus-rs once, see
# e2e/interop/README.md.
interop: setup build images $(BIN)/staticcheck
	sh e2e/interop/build-nydus.sh $(CACHE)/interop
	go vet -tags interop ./e2e/interop
	$(BIN)/staticcheck -tags interop ./e2e/interop
	REQUIRE_ALL=1 QUARRY_NYDUS=$(CACHE)/interop go test -tags interop -timeout 25m -count=1 ./e2e/interop

# The figures that gate, of the Debian pair or, where make corpus has made them, of
# two images of each family; bench-all takes every image.
bench: setup build images
	go run ./e2e/bench $(BENCH)

# What happens when something dies or lies: a table, part of test.
faults: setup build images
	go test -count=1 -v -run FaultMatrix ./e2e

bench-all: setup build images corpus
	go run ./e2e/bench -all

# 16 real images, and what they cost to keep at each chunk size.
corpus: setup
	go run ./e2e/corpus build --dir $(QUARRY_CORPUS) --debs $(QUARRY_DEBS)

corpus-report: build corpus
	go run ./e2e/corpus report --dir $(QUARRY_CORPUS) --json $(CACHE)/corpus-report.json

# Records anew which pages cold commands read, for the tests that replay them; the
# figures in nbd/blockdev/replay_test.go are of the old ones then.
record: setup build images
	go run ./e2e/record -out nbd/blockdev/testdata

lint: $(BIN)/staticcheck
	@bad=$$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l); if [ -n "$$bad" ]; then echo "not gofmt-ed: $$bad"; exit 1; fi
	go vet ./...
	$(BIN)/staticcheck ./...
	go vet -tags vm ./nbd/attach
	$(BIN)/staticcheck -tags vm ./nbd/attach

# What reads bytes from outside, 10 s each.
FUZZ := api/registry:FuzzParse converter:FuzzLayerStack converter/layer:FuzzRead converter/oci:FuzzOpen internal/inflate:FuzzReader rafs:FuzzDecode rafs:FuzzPatched store/cache:FuzzIndex store/trace:FuzzDecode store/trace:FuzzStream nbd/attach:FuzzNetlink \
	api:FuzzFrameReader worker/guest:FuzzAnswers worker/guest/wire:FuzzFrames worker/holder:FuzzRequest worker/sentry:FuzzAnswer worker/network/dns:FuzzParseQuery worker/network/wait:FuzzPacket

fuzz:
	@.ci/fuzz 10s $(FUZZ)

# Every fuzz target for 5 minutes, and the tests too long for every change.
long: setup build images
	@.ci/fuzz 5m
	go test -count=1 -timeout 60m ./e2e/vm -full
	go vet -tags long ./converter
	go test -tags long -count=1 -timeout 20m -run WithoutHoles ./converter

# Writes the golden files anew; read the diff.
golden:
	go test $$(grep -rl '"update"' --include='*_test.go' . | xargs -n1 dirname | sort -u) -update

build: $(BIN)/quarry $(BIN)/quarry-shim $(BIN)/quarry-guest

$(BIN)/quarry: $(SOURCES)
	go build -o $@ -ldflags '-X main.version=$(VERSION)' ./cmd/quarry

$(BIN)/quarry-shim: $(SOURCES)
	go build -o $@ ./cmd/quarry-shim

# Runs in guests: static, and small.
$(BIN)/quarry-guest: $(SOURCES)
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o $@ ./cmd/quarry-guest

# All that tests need, for make -j2: images are made by one thread, and come first.
ready: images setup build $(BIN)/staticcheck $(BIN)/gotestsum

setup: $(CACHE)/packages $(BIN)/runsc $(BIN)/versitygw $(BIN)/conformance $(BIN)/crane $(BIN)/regctl $(BIN)/registry
	@go mod download

$(CACHE)/packages: Makefile
	@mkdir -p $(CACHE)
	@missing=; for p in $(PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
		echo "installing$$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@touch $@

# Built outside of this module: only the program is needed.
$(BIN)/runsc: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(RUNSC)

# The S3 server of tests.
$(BIN)/versitygw: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(VERSITYGW)

# The distribution specification's own tests of registries.
$(BIN)/conformance: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(CONFORMANCE)

# Clients of registries that push and pull in tests, beside skopeo.
$(BIN)/crane: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(CRANE)

$(BIN)/regctl: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(REGCTL)

# The registry that pushes are compared with.
$(BIN)/registry: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(DISTRIBUTION)

$(BIN)/staticcheck: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(STATICCHECK)

# Runs tests, and those that fail once more.
$(BIN)/gotestsum: | $(CACHE)/packages
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(GOTESTSUM)

# Two independent builds of each of two real images: debian, and debian-again with
# another tar order and one more package; cold, with what a task needs, and
# cold-again likewise.
images: pair $(QUARRY_IMAGES)/cold/index.json $(QUARRY_IMAGES)/cold-again/index.json

pair: $(QUARRY_IMAGES)/debian/index.json $(QUARRY_IMAGES)/debian-again/index.json

$(QUARRY_IMAGES)/debian/index.json: e2e/demo/debian-image.sh | $(CACHE)/packages
	@mkdir -p $(QUARRY_IMAGES)
	sh e2e/demo/debian-image.sh $(QUARRY_IMAGES)/debian name

$(QUARRY_IMAGES)/debian-again/index.json: e2e/demo/debian-image.sh $(QUARRY_IMAGES)/debian/index.json
	sh e2e/demo/debian-image.sh $(QUARRY_IMAGES)/debian-again inode jq

COLD_PACKAGES := python3-numpy git python3-pytest python3-hypothesis

$(QUARRY_IMAGES)/cold/index.json: e2e/demo/debian-image.sh e2e/demo/cold-prepare.sh $(QUARRY_IMAGES)/debian-again/index.json
	PREPARE=e2e/demo/cold-prepare.sh sh e2e/demo/debian-image.sh $(QUARRY_IMAGES)/cold name $(COLD_PACKAGES)

$(QUARRY_IMAGES)/cold-again/index.json: e2e/demo/debian-image.sh e2e/demo/cold-prepare.sh $(QUARRY_IMAGES)/cold/index.json
	PREPARE=e2e/demo/cold-prepare.sh sh e2e/demo/debian-image.sh $(QUARRY_IMAGES)/cold-again inode $(COLD_PACKAGES) jq

clean:
	rm -rf $(BIN) $(CACHE)
