// Package router decides where an event goes and how it looks there: Route
// turns an outbox.Event into a Message by templates that New compiled once.
//
// It is pure: the same event under the same configuration gives the same
// message. docs/message-format.md is the specification of what it produces; a
// test computes the values that are worked out there.
//
// A value that is not there is never replaced by something else. A message with
// half a routing key would reach the wrong queue and be confirmed; an error
// reaches a person.
package router
