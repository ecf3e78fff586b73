"""What a method is made of: models as vectors, one client's data, messages, draws, mixing."""
