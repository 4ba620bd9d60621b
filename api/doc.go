// Package api is quarry's HTTP contract: its routes, JSON types, batch frames
// and error table, and the handler that serves them from a store. One package
// holds both sides' view of the contract, so that server and client cannot
// drift apart; FORMAT.md and openapi.yaml describe it for everybody else.
package api
