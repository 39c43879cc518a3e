"""Answers a file of requests, or a column of a table, without a server: Ray Data over a pool of engines."""
