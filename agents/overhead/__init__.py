"""What observing costs the observed: measured on the machine at hand, with the agent's own programs."""
