"""A client's model as a folder of its own, and predictions with it."""
