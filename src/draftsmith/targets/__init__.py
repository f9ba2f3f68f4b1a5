"""The target: where it comes from, what it is, whether it fits, how it is loaded.

Knows nothing of drafts, decoding or registries.
"""
