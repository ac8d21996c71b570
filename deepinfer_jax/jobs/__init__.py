"""Offline jobs: a file of requests in, a file of answers out, through any number of kills."""
