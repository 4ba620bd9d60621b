# Two commands do everything on a fresh Debian 12 machine, as root:
#   make demo    all set-up, then the main job
#   make test    all set-up, then every test

SHELL := /bin/sh
CACHE := $(CURDIR)/.cache
BIN := $(CURDIR)/bin
export PATH := $(BIN):$(PATH)
export QUARRY_BIN := $(BIN)
export QUARRY_IMAGES := $(CACHE)/images
export QUARRY_DEBS := $(CACHE)/debs

# The version quarry doctor names is the one that is installed here.
RUNSC := $(shell sed -n 's/^const runscModule = "\(.*\)"/\1/p' cmd/quarry/doctor.go)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
PACKAGES := ca-certificates gcc libc6-dev debootstrap umoci skopeo erofs-utils libnbd-bin nbdkit qemu-utils attr zstd openssl util-linux busybox-static procps
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
SOURCES := $(shell find . -name '*.go' -not -name '*_test.go' -not -path './.cache/*') go.mod go.sum

.PHONY: demo test unit bench lint fuzz e2e golden build setup images clean

demo: setup build images
	go run ./e2e/demo

test: setup build images lint
	go test -race -timeout 20m ./...

# Unit and package tests alone, quick, without the built programs.
unit:
	go test $$(go list ./... | grep -v /e2e)

e2e: setup build images
	go test -race -timeout 15m -count=1 ./e2e/...

bench: setup build images
	go run ./e2e/bench

lint: $(BIN)/staticcheck
	@bad=$$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l); if [ -n "$$bad" ]; then echo "not gofmt-ed: $$bad"; exit 1; fi
	go vet ./...
	$(BIN)/staticcheck ./...

# 30 s for each fuzz target.
fuzz:
	@go list ./... | while read -r pkg; do \
		go test -list '^Fuzz' $$pkg | grep '^Fuzz' | while read -r target; do \
			echo "$$pkg $$target"; go test -run '^$$' -fuzz "^$$target\$$" -fuzztime 30s $$pkg || exit 1; \
		done || exit 1; \
	done

# Writes the golden files anew; read the diff.
golden:
	go test $$(grep -rl '"update"' --include='*_test.go' . | xargs -n1 dirname | sort -u) -update

build: $(BIN)/quarry $(BIN)/quarry-shim

$(BIN)/quarry: $(SOURCES)
	CGO_ENABLED=0 go build -o $@ -ldflags '-X main.version=$(VERSION)' ./cmd/quarry

$(BIN)/quarry-shim: $(SOURCES)
	CGO_ENABLED=0 go build -o $@ ./cmd/quarry-shim

setup: $(CACHE)/packages $(BIN)/runsc
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
$(BIN)/runsc:
	@mkdir -p $(BIN)
	cd / && CGO_ENABLED=0 GOBIN=$(BIN) go install $(RUNSC)

$(BIN)/staticcheck:
	@mkdir -p $(BIN)
	cd / && GOBIN=$(BIN) go install $(STATICCHECK)

# Two independent builds of one real image: debian, and debian-again with
# another tar order and one more package.
images: $(QUARRY_IMAGES)/debian/index.json $(QUARRY_IMAGES)/debian-again/index.json

$(QUARRY_IMAGES)/debian/index.json: e2e/demo/debian-image.sh
	@mkdir -p $(QUARRY_IMAGES)
	sh e2e/demo/debian-image.sh $(QUARRY_IMAGES)/debian name

$(QUARRY_IMAGES)/debian-again/index.json: e2e/demo/debian-image.sh $(QUARRY_IMAGES)/debian/index.json
	sh e2e/demo/debian-image.sh $(QUARRY_IMAGES)/debian-again inode jq

clean:
	rm -rf $(BIN) $(CACHE)
