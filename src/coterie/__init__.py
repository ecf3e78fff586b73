"""coterie: personalised federated learning in which every client finds its right collaborators."""

__version__ = "0.1.0"
