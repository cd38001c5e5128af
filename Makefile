# Every target prints its help from the text after "##".
GO       ?= go
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LINT     := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.12.2
PKG      ?= ./...

.PHONY: help setup build test demo lint
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the servers and the compiler that tests and demo need, if they are missing
	@scripts/setup

build: ## bin/cdcpub, static and stripped
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/cdcpub ./cmd/cdcpub

test: setup ## all tests against real servers, with the race detector
	@# Looked for now: setup may just have installed it.
	@race=-race; command -v "$${CC:-gcc}" >/dev/null || { race=; echo "no C compiler: the tests run without the race detector"; }; \
	set -x; scripts/test-env -- $(GO) test $$race -timeout 20m -p 2 $(PKG)

demo: setup build ## a small order service, the connector and a consumer on private servers; Ctrl-C or DEMO_SECONDS=n ends it
	@scripts/demo

lint: ## gofmt, vet and golangci-lint with the import rules
	@files=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$files" || { echo "not gofmt-ed: $$files"; exit 1; }
	$(GO) vet ./...
	$(GO) run $(LINT) run ./...
