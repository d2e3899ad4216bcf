"""Penstock inside other programs' processes: behind Ray Serve, or behind whatever else calls Python in place of HTTP."""
