// Package monitor shows over HTTP what the connector is doing: Prometheus
// metrics, liveness, readiness and a status document.
//
// It knows no other package of the connector. Everything it shows comes from one
// function that returns a Status, called once for each request, so that all
// figures of one answer belong to the same moment and a scrape costs the stages
// nothing but reading their counters.
//
// There is no authentication. Answers hold event and aggregate IDs and the text
// of errors, never payloads or secrets; request bodies are not read.
package monitor
