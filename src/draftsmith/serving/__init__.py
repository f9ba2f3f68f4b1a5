"""Serving a registered pair over HTTP, and handing it to other servers."""
