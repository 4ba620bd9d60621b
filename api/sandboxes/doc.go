// Package sandboxes is the HTTP contract of a worker: routes, JSON documents, error
// table, and the handler that serves them from a sandbox.Node. openapi.yaml says the
// same for other languages, and a test keeps the two together.
package sandboxes
