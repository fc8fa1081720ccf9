"""Bridges to other libraries, one module each; a module imports its library when its function is called."""
