"""The engine as a library: the server's own parts, without a server."""
