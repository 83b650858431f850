"""Serves the runs, recordings and series of a folder to a browser: read-only, on loopback."""
