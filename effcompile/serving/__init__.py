"""Serving a planned generation: requests of many clients in one batch, and the OpenAI completions protocol
over HTTP.

desk        a bounded queue and one thread that computes: requests in, tokens out
text        tokens as pieces of text, stop texts among them
protocol    the JSON of the protocol
app         the routes (starlette, run by uvicorn)
"""
