"""Pure numerics, arrays in and arrays out: no clock, broker, disk or log, no ranks and no jobs."""
