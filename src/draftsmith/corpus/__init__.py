"""Prompts, self-written prompts, rollouts of the target, and the dataset that they become."""
