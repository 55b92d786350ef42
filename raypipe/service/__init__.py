"""Training over an API: the HTTP server of ``raypipe serve``, which speaks the Tinker API."""
