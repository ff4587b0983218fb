"""REST on a Unix socket: status, images, clients, events, health."""
