"""Training a draft on its target's distributions: divergences, target signals, batches, trainer."""
