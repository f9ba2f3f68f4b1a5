"""Measuring a pair: acceptance, losslessness, speed, and the cost model that ties them together."""
