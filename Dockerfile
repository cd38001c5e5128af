# The image of cdcpub: one static binary, the usual certificate authorities, no
# shell, not root. See docs/docker.md.
#
#     docker build -t cdcpub .
#     docker build -t cdcpub-orders --target orders .    # the example's service and consumer

FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /out/cdcpub ./cmd/cdcpub
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o /out/orders ./examples/orders
RUN mkdir -p /out/var/lib/cdcpub

FROM scratch AS orders
COPY --from=build /out/orders /orders
USER 65532:65532
ENTRYPOINT ["/orders"]

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build --chown=65532:65532 /out/var/lib/cdcpub /var/lib/cdcpub
COPY --from=build /out/cdcpub /cdcpub
USER 65532:65532
ENV CDCPUB_MONITOR_LISTEN=:7690
ENV CDCPUB_OFFSETS_PATH=/var/lib/cdcpub/state
# The position. Without a named volume it is lost with the container, and the next
# start refuses, since it cannot tell what was published.
VOLUME /var/lib/cdcpub
EXPOSE 7690
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["/cdcpub", "status", "--ready"]
ENTRYPOINT ["/cdcpub"]
CMD ["run"]
