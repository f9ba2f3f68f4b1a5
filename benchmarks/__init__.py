"""Studies of the system itself, run by hand; what they write is kept under docs/measurements/."""
