"""Work across machines: hosts, routes, staging, remote runs, watching; over the user's own ssh."""
