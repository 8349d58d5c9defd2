"""The dialect of OpenAI's HTTP API, for clients that speak it: models, chat, completions, embeddings.

`bodies` reads requests, `answers` writes responses, `errors` says what went wrong, all three without any I/O; `surface`
ties them to routes, and `description` tells `/openapi.json` about them.
"""
