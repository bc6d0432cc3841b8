"""The gateway: HTTP for applications in other languages (docs/gateway.md, decision 066).

`gateway_daemon.py` runs the process, and `http_routes.py` has the routes. `callers.py` keeps a
client for each caller, with the caller's own token, so that the servers check its permissions;
`shared_directory.py` gives all of these clients one session with ZooKeeper.

`http_appends.py` appends transactions, and `idempotent_appends.py` does so exactly once for each
idempotency key. `http_feeds.py` streams feeds. `http_json.py` has helpers of all routes.
`request_headers.py` and `request_parsing.py` check requests, `json_errors.py` converts errors to
responses, and `openapi.py` creates the OpenAPI document. The folder `console` has the web pages for
operators.
"""
