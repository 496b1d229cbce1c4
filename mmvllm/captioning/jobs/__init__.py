"""Turns tasks into records, with one engine, several engines, Ray or an endpoint."""
