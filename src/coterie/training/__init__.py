"""The round loop, the guard in front of aggregation, and where clients' states wait."""
