"""The registry: one version a pair, aliases for what services load, records of every move."""
