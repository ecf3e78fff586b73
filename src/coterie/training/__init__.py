"""The round loop, and the guard that checks uploads before they are aggregated."""
