# A store node: the two programs and the roots of public certificates, nothing
# else, as a user that is not root. A worker is no container: it needs runsc,
# mounts and root, see docs/OPERATIONS.md.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-X main.version=$VERSION" -o /out/usr/local/bin/quarry ./cmd/quarry && \
    CGO_ENABLED=0 go build -trimpath -o /out/usr/local/bin/quarry-shim ./cmd/quarry-shim && \
    mkdir -p /out/etc/ssl/certs && cp /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/ && \
    install -d -m 1777 /out/tmp && install -d -m 0700 -o 65532 -g 65532 /out/var/lib/quarry

FROM scratch
COPY --from=build --chown=65532:65532 /out/var/lib/quarry /var/lib/quarry
COPY --from=build /out/ /
ENV PATH=/usr/local/bin QUARRY_DATA=/var/lib/quarry
USER 65532:65532
VOLUME /var/lib/quarry
EXPOSE 7070
STOPSIGNAL SIGTERM
ENTRYPOINT ["quarry"]
CMD ["serve", "--listen", "0.0.0.0:7070", "--insecure-http"]
