# The two programs, with nothing else: a store node runs in it as it is; a worker
# also needs runsc on the PATH, /dev/fuse, loop devices and root.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-X main.version=$VERSION" -o /out/quarry ./cmd/quarry && \
    CGO_ENABLED=0 go build -trimpath -o /out/quarry-shim ./cmd/quarry-shim

FROM debian:bookworm-slim
COPY --from=build /out/quarry /out/quarry-shim /usr/local/bin/
VOLUME /var/lib/quarry
ENTRYPOINT ["quarry"]
