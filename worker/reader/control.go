package reader

import (
	"encoding/json"
	"net/http"

	"quarry/store/chunk"
)

// controlHandler serves the reader's control socket. GET /ping also keeps an
// idle reader for another while.
func (r *reader) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) {
		r.connState(0)
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /images/{id}/stats", r.ofOpenImage(func(w http.ResponseWriter, _ *http.Request, im *openImage) {
		answerJSON(w, im.stats())
	}))
	mux.HandleFunc("POST /images/{id}/start", r.serveStart)
	mux.HandleFunc("DELETE /images/{id}/trace", r.serveNoTrace)
	mux.HandleFunc("POST /images/{id}/pull", r.servePull)
	mux.HandleFunc("DELETE /images/{id}/pin", r.serveUnpin)
	mux.HandleFunc("GET /cache", func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, r.disk.cached()) })
	mux.Handle("GET /metrics", r.metrics.handler())
	return mux
}

// ofOpenImage makes the handler of a route about an image that is open; any
// other is not found.
func (r *reader) ofOpenImage(serve func(http.ResponseWriter, *http.Request, *openImage)) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		id, err := chunk.ParseHex(q.PathValue("id"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.mu.Lock()
		im := r.open[id]
		r.mu.Unlock()
		if im == nil || !im.loaded() {
			http.Error(w, "image is not open", http.StatusNotFound)
			return
		}
		serve(w, q, im)
	}
}

func answerJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}
