"""The gateway: HTTP for applications in other languages (docs/gateway.md, decision 066).

`gateway_daemon.py` runs the process, and `http_routes.py` defines the routes. `callers.py` keeps a
client for each caller. This client presents the caller's own token, so that the servers check the
caller's permissions. All clients share one session with ZooKeeper (`shared_directory.py`).

`http_appends.py` appends transactions, and `idempotent_appends.py` appends them exactly once for
each idempotency key. `http_feeds.py` streams feeds. `http_json.py` contains helpers for all routes.
`request_headers.py` and `request_parsing.py` check requests, `json_errors.py` converts errors to
responses, and `openapi.py` creates the OpenAPI document. The folder `console` contains the web
pages for operators.
"""
