"""What runs on a node: observes and publishes, never judges."""
