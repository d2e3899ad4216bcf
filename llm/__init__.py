"""The engine as a library: the parts of the server without HTTP."""
