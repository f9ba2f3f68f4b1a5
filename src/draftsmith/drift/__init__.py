"""Has a draft drifted away from its target: paired comparisons and verdicts that rest on them."""
