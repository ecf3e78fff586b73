"""Real federations: sites that keep their data, a coordinator, and the transports between them."""
