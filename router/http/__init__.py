"""The HTTP application: what every request passes, its routes, and clients that leave."""
